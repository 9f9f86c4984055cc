"""The one validator behind every door: a request as decoded in, a checked request of the Engine interface out.

    field.py        types, ranges and sizes of single values; collects what is wrong with a request
    limits.py       what may be asked of this server
    content.py      text | tokens | messages; requests of ModelService
    contexts.py     requests of ContextService; labels, time to live, pins, pages of lists
    generation.py   Generate and Forward, and sampling wherever it is asked for
    snapshots.py    requests of SnapshotService

Every field's type, range and size is checked here before anything is allocated for it, whatever the door. A request
with wrong fields raises one InvalidArgument whose violations name each of them (up to 16) by its path in the request
message ("sampling.temperature", "stop[3]", "tokens.ids[17]"). Nothing here knows the engine's state: that a context
exists, has room or is free is for the engine to say.
"""

from jaxctx_server.validate.content import Content, MessageContent, TextContent
from jaxctx_server.validate.field import Field, validate
from jaxctx_server.validate.limits import Limits

__all__ = ["Content", "Field", "Limits", "MessageContent", "TextContent", "validate"]
