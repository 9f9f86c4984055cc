"""What a caller may choose, by keyword. Those that mirror a request are generated from protos/jaxctx/v1.

Times are in seconds; a `ttl_s` of `math.inf` is for ever, and None, like anything not given, leaves it to the server.
"""

from collections.abc import Sequence
from typing import TypedDict

from jaxctx.v1.options import *  # noqa: F403
from jaxctx.v1.options import NewOptions

Message = dict[str, str]  # {"role": …, "content": …}
Ranges = Sequence[tuple[int, int]]


class Content(TypedDict, total=False):
    """What a fill appends, where it is not a text: tokens or messages. And how: FillRequest and ChatMessages."""

    tokens: Sequence[int] | None
    messages: Sequence[Message] | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None


class CreateOptions(NewOptions, Content, total=False):
    """A new context, and what is in it at once."""
