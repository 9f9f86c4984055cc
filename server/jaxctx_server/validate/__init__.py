"""The one validator of every transport: whether a request of the contract may be handed to a service.

    scan.py         how much a request's bytes hold, counted before they are parsed
    rules.py        the rules that the contract states of its fields (protos/jaxctx/v1/rules.proto)
    cross_field.py  rules between fields that the contract states in words, and the limits of one server

Every field's range and size is checked before anything is allocated for it. A request with wrong fields raises one
InvalidArgument whose violations name each of them (up to 16) by its path in the request message
("sampling.temperature", "stop[3]", "tokens.ids[17]"). Nothing here knows the engine's state: whether a context exists,
fits or is free is for the engine to say.
"""

from jaxctx_server.validate.cross_field import Limits, prompt_length_error
from jaxctx_server.validate.rules import utf8_size, validate

__all__ = ["Limits", "prompt_length_error", "utf8_size", "validate"]
