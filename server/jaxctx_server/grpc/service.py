"""What every service does with a request: decode and validate, before the engine works; encode, after."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.codec import encode
from jaxctx.engine.interface import Caller, Engine
from jaxctx_server.grpc.pipeline import KEY, Context
from jaxctx_server.serving import Served, Serving
from jaxctx_server.validate import Field, validate

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Arguments = TypeVarTuple("Arguments")
LONGEST_S = 86400.0  # seconds; nobody waits for ever


class Service:
    """A service of the contract, in front of what is served."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    def begin(self, context: Context, request: Message, check: Callable[[Field], T]) -> tuple[Served, Caller, T]:
        """What is served, to whom, and what `check` of the validator makes of the request."""
        served = self._serving.served()
        return served, self.caller(context), validate(check, served.limits, request)

    def caller(self, context: Context) -> Caller:
        """Whose namespace the running method works in, and until when."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        deadline = self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        return Caller(tenant=KEY.get().tenant, deadline=deadline)


def one(check: Callable[[Field], T]) -> Callable[[Field], tuple[T]]:
    """For `unary`, a check that makes one argument."""
    return lambda request: (check(request),)


def unary(
    check: Callable[[Field], tuple[*Arguments]],
    method: Callable[[Engine, Caller, *Arguments], Awaitable[object]],
    kind: type[M],
    field: str = "",
) -> Callable[..., Awaitable[M]]:
    """A method that hands its request to the engine's `method`, as the arguments that `check` makes of it.

    The answer goes back as a message of class `kind`, or as this `field` of one.
    """

    async def call(self: Service, request: Message, context: Context) -> M:
        served, caller, arguments = self.begin(context, request, check)
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
