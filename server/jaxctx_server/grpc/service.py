"""What every service does with a request: decode and validate, before the engine works; encode, after."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.codec import encode
from jaxctx.engine.interface import Caller
from jaxctx.v1.services import ENGINE_CALLS, METHODS, SERVICES
from jaxctx_server.grpc.pipeline import KEY, Context
from jaxctx_server.serving import LocalModel, Served, Serving
from jaxctx_server.validate import validate
from jaxctx_server.validate.requests import Part, made

M = TypeVar("M", bound=Message)
S = TypeVar("S")
ORDER = {  # what the entries of lists are ordered by
    "ListContexts": "context_id",
    "ListSnapshots": "name",
    "ListSnapshotVersions": "version",
    "ListPublications": "publication_id",
    "ListModels": "model_id",
}
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

    def begin(self, context: Context, request: Message) -> tuple[LocalModel, Caller]:
        """As `valid`, of the model. Raises NotFound for one that is not served."""
        _, caller = self.valid(context, request)
        return self._serving.model(getattr(request, "model_id", "")), caller

    def caller(self, context: Context) -> Caller:
        """Whose namespace the running method works in, and until when."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        deadline = self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        return Caller(tenant=KEY.get().tenant, deadline=deadline)


def unary(rpc: str, method: str, parts: Sequence[Part]) -> Callable[..., Awaitable[Any]]:
    """A call of the contract that hands its request to this method of the engine, with an argument for each of `parts`,
    see `made`. The answer goes back as its response, or as what is in that; a list in pages, see `page_of`.
    """
    kind: type[Any] = GetMessageClass(METHODS[rpc].output_type)
    is_list = "next_page_token" in kind.DESCRIPTOR.fields_by_name
    field = kind.DESCRIPTOR.fields[0].name if is_list or len(kind.DESCRIPTOR.fields) == 1 else ""

    async def call(self: Service, request: Message, context: Context) -> Any:
        served, caller = self.begin(context, request)
        answer = await getattr(served.engine, method)(caller, *(made(request, part) for part in parts))
        return page_of(request, answer, kind, field, ORDER[rpc]) if is_list else told(answer, kind, field)

    return call


def with_engine_calls(service: type[S]) -> type[S]:
    """Decorates a service: what an engine does by one call, and it does not say itself, is handed to the engine."""
    for method in SERVICES[service.__name__].methods:
        if method.name in ENGINE_CALLS and method.name not in vars(service):
            setattr(service, method.name, unary(method.name, *ENGINE_CALLS[method.name]))
    return service


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
