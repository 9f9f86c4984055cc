"""The one validator behind every door: a request of the contract in, arguments of the Engine interface out.

    scan.py       how much a request's wire form holds by the rules, before it is parsed
    rules.py      the rules that the contract states of its fields; collects what is wrong with a request
    requests.py   what these leave to a server, rules between fields in words, and what is made of a request then

Every field's range and size is checked here before anything is allocated for it, whatever the door. A request with
wrong fields raises one InvalidArgument whose violations name each of them (up to 16) by its path in the request message
("sampling.temperature", "stop[3]", "tokens.ids[17]"). Nothing here knows the engine's state: that a context exists, has
room or is free is for the engine to say.
"""

from jaxctx_server.validate.cross_field import Limits
from jaxctx_server.validate.rules import utf8_size, validate

__all__ = ["Limits", "utf8_size", "validate"]
