"""The one validator behind every door: a request as decoded in, a checked request of the Engine interface out.

    limits.py       what may be asked of this server
    checks.py       types, ranges and sizes of single fields; collects what is wrong with a request
    content.py      text | tokens | messages
    settings.py     labels, time to live, pins
    contexts.py     requests of ContextService, Generate and Forward apart
    generation.py   Generate, and sampling wherever it is asked for
    passes.py       Forward
    snapshots.py    requests of SnapshotService
    models.py       requests of ModelService

Every field's type, range and size is checked here before anything is allocated for it, whatever the door. A request
with wrong fields raises one InvalidArgument whose violations name each of them (up to 16) by its path in the request
message ("sampling.temperature", "stop[3]", "tokens.ids[17]"). Nothing here knows the engine's state: that a context
exists, has room or is free is for the engine to say.
"""

from jaxctx_server.validate.content import Content, MessageContent, TextContent, TokenContent
from jaxctx_server.validate.limits import Limits

__all__ = ["Content", "Limits", "MessageContent", "TextContent", "TokenContent"]
