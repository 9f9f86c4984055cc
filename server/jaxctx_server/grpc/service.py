"""What every service does with a request, which is valid: decode, before the engine works; encode, after."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from inspect import isawaitable
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.convert import encode
from jaxctx.engine.interface import Caller
from jaxctx.services import METHODS
from jaxctx_server.grpc.interceptor import KEY, Context
from jaxctx_server.lifecycle import LocalModel, ServerLifecycle, ServingState
from jaxctx_server.validate.cross_field import Part, made

NEXT = "next_page_token"  # the last field of a page of a list
PAGE_SIZE = 100  # entries of one page of a list where no number is asked for
LONGEST_S = 86400.0  # seconds; nobody waits for ever


class Service:
    """A service of the contract, in front of what is served."""

    def __init__(self, serving: ServerLifecycle, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    def valid(self, context: Context, request: Any) -> tuple[ServingState, Caller]:
        """What is served, to whom and until when. A valid request for a page then has how many to find."""
        served = self._serving.served()
        if "page_token" in request.DESCRIPTOR.fields_by_name:
            request.limit = (request.limit or PAGE_SIZE) + 1  # one more tells that there is another page
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        deadline = self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        return served, Caller(tenant=KEY.get().tenant, deadline=deadline)

    def begin(self, context: Context, request: Message) -> tuple[LocalModel, Caller]:
        """As `valid`, of the model. Raises NotFound for one that is not served."""
        _, caller = self.valid(context, request)
        return self._serving.model(getattr(request, "model_id", "")), caller


def answered(rpc: str, work: Callable[[LocalModel, Caller, Any], Any]) -> Callable[..., Awaitable[Any]]:
    """A call of the contract: its response tells what `work`, of either kind, returns for a valid request."""

    async def call(self: Service, request: Message, context: Context) -> Any:
        found = work(*self.begin(context, request), request)
        answer = await found if isawaitable(found) else found
        return page_of(rpc, request, answer) if "page_token" in request.DESCRIPTOR.fields_by_name else told(rpc, answer)

    return call


def streamed(rpc: str, work: Callable[[LocalModel, Caller, Any], Any]) -> Callable[..., AsyncIterator[Any]]:
    """A call of the contract: each of its responses tells of one of what `work` returns for a valid request. That is
    closed at once with whoever reads it.
    """
    kind = GetMessageClass(METHODS[rpc].output_type)

    async def call(self: Service, request: Message, context: Context) -> AsyncIterator[Any]:
        async with aclosing(work(*self.begin(context, request), request)) as answers:
            async for answer in answers:
                yield encode(answer, kind)

    return call


def handed(rpc: str, method: str, parts: Sequence[Part]) -> Callable[..., Any]:
    """A call of the contract that hands parts of its request, see `made`, to this method of the engine."""

    def work(model: LocalModel, caller: Caller, request: Any) -> Any:
        return getattr(model.engine, method)(caller, *(made(request, part) for part in parts))

    return (streamed if METHODS[rpc].server_streaming else answered)(rpc, work)


def told(rpc: str, answer: Any) -> Any:
    """An answer as the response of a method; as what is in that, where it has one field or is a page of a list."""
    kind = GetMessageClass(METHODS[rpc].output_type)
    if answer is None:
        return kind()
    fields = kind.DESCRIPTOR.fields
    if len(fields) > 1 and fields[-1].name != NEXT:
        return encode(answer, kind)
    name, entry = fields[0].name, cast(Any, fields[0].message_type)
    if entry is None:
        return kind(**{name: answer})
    each = GetMessageClass(entry)
    return kind(**{name: [encode(item, each) for item in answer] if fields[0].is_repeated else encode(answer, each)})


def page_of(rpc: str, request: Any, found: Iterable[Any]) -> Any:
    """Of what was found behind its page token, all but the last that a valid request has room for, and if that is there
    the next token. What was found twice is there once.

    That is the last one's id, its first field: names, which go up; of versions the number, which goes down.
    """
    entry: Any = METHODS[rpc].output_type.fields[0].message_type
    by = "version" if rpc == "ListSnapshotVersions" else entry.fields[0].name
    last, limit = request.page_token, request.limit - 1

    def behind(one: Any) -> bool:
        name = getattr(one, by)
        return name > last if isinstance(name, str) else not last or name < int(last)

    once = {getattr(one, by): one for one in sorted(filter(behind, found), key=lambda one: getattr(one, "version", 0))}
    rest = [once[each] for each in sorted(once, reverse=by == "version")]
    page = told(rpc, rest[:limit])
    if len(rest) > limit:
        page.next_page_token = str(getattr(rest[limit - 1], by))
    return page
