"""What every service does with a request: decode and validate, before the engine works; encode, after."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.codec import encode
from jaxctx.engine.interface import Caller
from jaxctx_server.grpc.pipeline import KEY, Context
from jaxctx_server.serving import Served, Serving
from jaxctx_server.validate import validate
from jaxctx_server.validate.requests import Part, made

T = TypeVar("T")
M = TypeVar("M", bound=Message)
PAGE_SIZE = 100  # entries of one page of a list where no number is asked for
LONGEST_S = 86400.0  # seconds; nobody waits for ever


class Service:
    """A service of the contract, in front of what is served."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    def begin(self, context: Context, request: Message) -> tuple[Served, Caller]:
        """What is served, and to whom, if the request is valid. Raises NotFound for a model that is not served."""
        served = self._serving.served()
        validate(served.limits, request)
        served.check_model(getattr(request, "model_id", ""))
        return served, self.caller(context)

    def caller(self, context: Context) -> Caller:
        """Whose namespace the running method works in, and until when."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        deadline = self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        return Caller(tenant=KEY.get().tenant, deadline=deadline)


def unary(
    parts: Sequence[Part], method: Callable[..., Awaitable[object]], kind: type[M], field: str = ""
) -> Callable[..., Awaitable[M]]:
    """A method that hands its request to the engine's `method`, with an argument for each of `parts`, see `made`.

    The answer goes back as a message of class `kind`, or as this `field` of one.
    """

    async def call(self: Service, request: Message, context: Context) -> M:
        served, caller = self.begin(context, request)
        arguments = [made(request, part) for part in parts]
        return told(await getattr(served.engine, method.__name__)(caller, *arguments), kind, field)

    return call


def told(answer: Any, kind: type[M], field: str = "") -> M:
    """An answer as a message; with `field` it, or each of several, becomes that field of the message. None: empty."""
    if not field:
        return kind() if answer is None else encode(answer, kind)
    there: Any = kind.DESCRIPTOR.fields_by_name[field]
    if there.message_type is None:
        return kind(**{field: answer})
    each = GetMessageClass(there.message_type)
    return kind(**{field: [encode(item, each) for item in answer] if there.is_repeated else encode(answer, each)})


def page_of(found: Sequence[T], limit: int, token: Callable[[T], str], kind: type[M], field: str) -> M:
    """The first `limit` of what was found, and if there are more the page token of the last one."""
    page = told(found[:limit], kind, field)
    if len(found) > limit:
        page.next_page_token = token(found[limit - 1])  # type: ignore[attr-defined]
    return page
