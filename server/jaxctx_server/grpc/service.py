"""What every service does with a request, before the engine does: decode and validate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from jaxctx.engine.interface import Caller
from jaxctx_server.grpc.pipeline import KEY, Context
from jaxctx_server.serving import Served, Serving
from jaxctx_server.validate import Field, validate

T = TypeVar("T")
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
        return served, self.caller(context), validate(check, served.limits, Decoded(request))

    def caller(self, context: Context) -> Caller:
        """Whose namespace the running method works in, and until when."""
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline
        return Caller(
            tenant=KEY.get().tenant, deadline=self._clock() + (LONGEST_S if remaining_s is None else remaining_s)
        )


def first_page(found: Sequence[T], limit: int, token: Callable[[T], str]) -> tuple[Sequence[T], str]:
    """The first `limit` of what was found, and the page token of the last one; "" if there are no more."""
    listed = found[:limit]
    return listed, token(listed[-1]) if len(found) > limit else ""


class Decoded(Mapping[str, object]):
    """A message as the validator takes it: each field by its name, None where it was not sent. Nothing is copied."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getitem__(self, name: str) -> object:
        """Raises AttributeError for a name that no field has, so that `get` does too."""
        value = getattr(self._message, name)
        field = self._message.DESCRIPTOR.fields_by_name[name]
        if field.is_repeated:
            is_list_of_messages = field.message_type is not None and not field.message_type.GetOptions().map_entry
            return _List(value) if is_list_of_messages else value
        if field.has_presence and not self._message.HasField(name):
            return None
        return value if field.message_type is None else Decoded(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._message.DESCRIPTOR.fields_by_name)

    def __len__(self) -> int:
        return len(self._message.DESCRIPTOR.fields)


class _List(Sequence[object]):
    """Messages, each decoded when it is looked at: how many there are is checked first."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, place: Any) -> Any:
        return Decoded(self._messages[place])
