"""What every service does with a request: decode and validate, before the engine works; encode, after."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.codec import encode
from jaxctx.engine.interface import Caller
from jaxctx_server.grpc.pipeline import KEY, Context
from jaxctx_server.serving import Served, ServedModel, Serving
from jaxctx_server.validate import validate
from jaxctx_server.validate.requests import Part, made

M = TypeVar("M", bound=Message)
PAGE_SIZE = 100  # entries of one page of a list where no number is asked for
LONGEST_S = 86400.0  # seconds; nobody waits for ever


class Service:
    """A service of the contract, in front of what is served."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    def valid(self, context: Context, request: Message) -> tuple[Served, Caller]:
        """What is served, and to whom, if the request is valid."""
        served = self._serving.served()
        validate(served.limits, request)
        return served, self.caller(context)

    def begin(self, context: Context, request: Message) -> tuple[ServedModel, Caller]:
        """As `valid`, of the model. Raises NotFound for one that is not served."""
        _, caller = self.valid(context, request)
        return self._serving.model(getattr(request, "model_id", "")), caller

    def caller(self, context: Context) -> Caller:
        """Whose namespace the running method works in, and until when."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        deadline = self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        return Caller(tenant=KEY.get().tenant, deadline=deadline)


def unary(
    parts: Sequence[Part], method: Callable[..., Awaitable[Any]], kind: type[M], field: str = "", by: str = ""
) -> Callable[..., Awaitable[M]]:
    """A method that hands its request to the engine's `method`, with an argument for each of `parts`, see `made`.

    The answer goes back as a message of class `kind`, or as this `field` of one; with `by` in pages, see `page_of`.
    """

    async def call(self: Service, request: Message, context: Context) -> M:
        served, caller = self.begin(context, request)
        arguments = [made(request, part) for part in parts]
        answer = await getattr(served.engine, method.__name__)(caller, *arguments)
        return page_of(request, answer, kind, field, by) if by else told(answer, kind, field)

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


def page_of(request: Any, found: Iterable[Any], kind: type[M], field: str, by: str) -> M:
    """Of what was found, as many as the request asks for, behind its page token, and if there are more the next token.

    That is the last one's `by`: names, which go up, or numbers, which go down.
    """
    last, limit = request.page_token, one_more(request) - 1

    def behind(one: Any) -> bool:
        name = getattr(one, by)
        return name > last if isinstance(name, str) else not last or name < int(last)

    rest = [one for one in found if behind(one)]
    page = told(rest[:limit], kind, field)
    if len(rest) > limit:
        page.next_page_token = str(getattr(rest[limit - 1], by))  # type: ignore[attr-defined]
    return page


def one_more(request: Any) -> int:
    """How many to find for a page: one more tells that there is another."""
    return (request.limit or PAGE_SIZE) + 1
