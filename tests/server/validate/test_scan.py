"""How much a message holds is known before it is parsed, and no message that is valid is refused by that."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxctx.errors import InvalidArgument
from jaxctx.rpc import METHODS
from jaxctx.v1 import context_service_pb2 as contexts
from jaxctx.v1 import model_service_pb2 as models
from jaxctx.v1 import rules_pb2
from jaxctx.v1 import session_service_pb2 as sessions
from jaxctx.v1 import snapshot_service_pb2 as snapshots
from jaxctx_server.validate import Limits, scan, validate
from tests.server.validate.wire_format import field, varint

LIMITS = Limits(vocab_size=512, max_context_tokens=300, default_max_tokens=16, queue_limit=64)
LONG = Limits(vocab_size=150_000, max_context_tokens=131_072, default_max_tokens=16, queue_limit=64)
MIB = 1 << 20
KINDS = {method.input_type.name: method.input_type for method in METHODS.values()}


def refusal(kind: Any, data: bytes, limits: Limits = LONG) -> tuple[str, str]:
    with pytest.raises(InvalidArgument) as raised:
        scan.scan(kind.DESCRIPTOR, limits, data)
    ((name, description),) = [(each.field, each.description) for each in raised.value.violations]
    return name, description


# --- messages that are valid ------------------------------------------------------------------------------------------


def values(each: FieldDescriptor, rule: Any) -> st.SearchStrategy[Any]:
    """What one value of a field may be; now and then at the end of what may be."""
    if each.message_type is not None and each.message_type.full_name == "google.protobuf.Duration":
        return st.just({"seconds": 1})
    if each.message_type is not None:
        return fields(each.message_type)
    if each.type == each.TYPE_STRING:
        if rule.id or rule.name:
            return st.text("abcXYZ.-_09", min_size=1, max_size=64).map(lambda text: "a" + text[1:])
        longest = min(rule.max_bytes, 300)
        return st.one_of(st.text("aä😀", max_size=longest // 4), st.just("x" * longest)).filter(
            lambda text: rule.min_bytes <= len(text.encode())
        )
    if each.type == each.TYPE_BYTES:
        return st.one_of(st.binary(min_size=rule.min_bytes, max_size=64), st.just(b"\xff" * rule.max_bytes))
    if each.type == each.TYPE_BOOL:
        return st.booleans()
    if each.enum_type is not None:
        return st.sampled_from([value.number for value in each.enum_type.values])
    high = rule.lte if rule.HasField("lte") else LIMITS.vocab_size - 1
    for name in (rule.lte_of, rule.lt_of):
        high = min(high, getattr(LIMITS, name) - bool(rule.lt_of)) if name else high
    low = rule.gte if rule.HasField("gte") else 0
    if each.type == each.TYPE_DOUBLE:
        return st.floats(low if not rule.HasField("gt") else 0.5, high)
    return st.integers(int(low), int(high))


@st.composite
def fields(draw: Any, kind: Any) -> dict[str, Any]:
    """The fields of a message of this class, most of them within the rules of each by itself."""
    found: dict[str, Any] = {}
    chosen = {each.name: draw(st.sampled_from([one.name for one in each.fields])) for each in kind.oneofs}
    for each in kind.fields:
        rule = each.GetOptions().Extensions[rules_pb2.rule]
        oneof = each.containing_oneof
        if oneof is not None and chosen[oneof.name] != each.name:
            continue
        needed = (oneof is not None and not each.has_options) or rule.required or rule.id or rule.name or rule.min_items
        if not needed and draw(st.booleans()):
            continue
        most = getattr(LIMITS, rule.max_items_of) if rule.max_items_of else rule.max_items
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            key, value = each.message_type.fields
            keys, one = values(key, rule.keys), values(value, rule)
            found[each.name] = draw(st.dictionaries(keys, one, max_size=min(most, 20)))
        elif rule.ranges:
            found[each.name] = sorted(draw(st.sets(st.integers(0, 300), max_size=64)))
            found[each.name] = found[each.name][: len(found[each.name]) // 2 * 2]
        elif each.is_repeated:
            size = draw(st.sampled_from([rule.min_items, 3, min(most, 20), most if each.message_type is None else 3]))
            one = draw(values(each, rule))
            found[each.name] = [one] * size if not rule.unique else [f"id{i}" for i in range(size)]
        else:
            found[each.name] = draw(values(each, rule))
    if kind.name == "ForwardRequest":
        for name in ("positions", "masks"):
            if name in found:
                found[name] = (found[name] or [0 if name == "positions" else {}]) * 300
                found[name] = found[name][: len(found["tokens"])]
    return found


def unpacked(message: Any) -> bytes:
    """The message with each number of its own lists as a field of its own."""
    told = b""
    for each, value in message.ListFields():
        alone = type(message)()
        if each.is_repeated and each.type in (each.TYPE_INT32, each.TYPE_DOUBLE):
            told += b"".join(varint(each.number << 3) + varint(one & 0xFFFFFFFFFFFFFFFF) for one in value)
            continue
        if each.message_type is not None and not each.is_repeated:
            told += field(each.number, unpacked(value))
            continue
        alone.MergeFrom(message)
        for other, _ in message.ListFields():
            if other.name != each.name:
                alone.ClearField(other.name)
        told += alone.SerializeToString()
    return told


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_valid_message_is_refused(kind: Any) -> None:
    """Whatever form it has on the wire: packed or not, with fields that are unknown, in parts that a parser merges."""
    accepted = []

    @settings(max_examples=100, deadline=None)
    @given(fields(kind), st.lists(st.integers(500, 10_000), max_size=20))
    def check(drawn: dict[str, Any], unknown: list[int]) -> None:
        message = GetMessageClass(kind)(**drawn)
        try:
            validate(LIMITS, message)
        except InvalidArgument:
            return
        accepted.append(message)
        told = message.SerializeToString()
        forms = [told, unpacked(message), told + b"".join(field(number, b"new") for number in unknown)]
        for data in forms:
            if data is not forms[2]:
                assert GetMessageClass(kind).FromString(data) == message
            scan.scan(kind, LIMITS, data)

    check()
    assert accepted


def test_large_messages_that_are_valid() -> None:
    ids = list(range(131_072))
    texts = {"messages": [{"role": "user", "content": "x" * 2000}] * 1024}
    parameters = [{"name": f"p{i}", "text": "x" * (2 * MIB)} for i in range(4)]
    masks = [{"bounds": range(128)} for _ in range(1024)]
    for message in (
        contexts.FillRequest(context_id="a", text="x" * (2 * MIB)),
        contexts.FillRequest(context_id="a", text="😀" * (MIB // 2)),
        contexts.FillRequest(context_id="a", tokens={"ids": ids}),
        contexts.FillRequest(context_id="a", messages=texts),
        contexts.ForwardRequest(context_id="a", tokens=ids, positions=ids, masks=[{} for _ in ids]),
        contexts.ForwardRequest(context_id="a", tokens=ids[:1024], masks=masks),
        contexts.ForkRequest(context_id="a", child_ids=[f"child-{i}" for i in range(1024)]),
        models.DetokenizeRequest(tokens=ids),
        sessions.SubmitCallRequest(session_id="a", template="{{p0}}", parameters=parameters[:3]),
    ):
        validate(LONG, message)
        scan.scan(message.DESCRIPTOR, LONG, message.SerializeToString())


# --- messages that hold too much --------------------------------------------------------------------------------------

SAMPLING = contexts.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number
EMPTY = {  # of two bytes each, as many as a message of 8 MiB has
    "parameters": (sessions.SubmitCallRequest, 4),
    "outputs": (contexts.ForwardRequest, 6),
    "masks": (contexts.ForwardRequest, 4),
    "child_ids": (contexts.ForkRequest, 3),
    "stop": (contexts.GenerateRequest, contexts.GenerateRequest.DESCRIPTOR.fields_by_name["stop"].number),
    "labels": (contexts.CreateContextRequest, contexts.CreateContextRequest.DESCRIPTOR.fields_by_name["labels"].number),
}
MANY = 4 * MIB - 64
ATTACKS = {f"empty {name}": (kind, field(number, b"") * MANY, name) for name, (kind, number) in EMPTY.items()} | {
    "messages": (contexts.FillRequest, field(4, field(1, b"") * MANY), "messages.messages"),
    "messages in parts": (contexts.FillRequest, field(4, field(1, b"") * 1000) * 4000, "messages.messages"),
    "bias": (contexts.GenerateRequest, field(SAMPLING, field(8, b"") * MANY), "sampling.logit_bias"),
    "bias in parts": (contexts.GenerateRequest, field(SAMPLING, field(8, b"") * 2) * (MIB), "sampling.logit_bias"),
    "packed": (contexts.FillRequest, field(3, field(1, b"\x00" * 8 * MIB)), "tokens.ids"),
    "packed, in parts": (contexts.ForwardRequest, field(2, b"\x00" * 100_000) * 80, "tokens"),
    "not packed": (models.DetokenizeRequest, b"\x10\x00" * MANY, "tokens"),
    "a packed list as one number each": (models.DetokenizeRequest, field(2, b"\x00") * (2 * MIB), "tokens"),
    "ranges together": (contexts.ForwardRequest, field(4, field(1, bytes(range(128)))) * 60_000, "masks"),
    "stop strings of many outputs": (
        sessions.SubmitCallRequest,
        field(4, field(4, field(5, b"") * MANY)),
        "parameters[0].output.stop",
    ),
    "unknown fields": (snapshots.SaveRequest, b"\xf8\x07\x00" * (2 * MIB), "request"),
    "unknown bytes": (snapshots.SaveRequest, field(99, b"\x00" * (8 * MIB)), "request"),
    "a number again and again": (sessions.ListSessionsRequest, b"\x08\x01" * MANY, "request"),
    "a text again and again": (contexts.CloseContextRequest, field(1, b"") * MANY, "request"),
    "a message again and again": (contexts.GenerateRequest, field(SAMPLING, b"") * MANY, "request"),
    "a field of another type": (contexts.ForkRequest, b"\x18\x01" * MANY, "request"),
    "a long text": (sessions.CreateSessionRequest, field(1, b"x" * (8 * MIB)), "session_id"),
    "a group": (contexts.ForkRequest, b"\xfb\x07" * MIB + b"\xfc\x07" * MIB, "request"),
    "deep unknown groups": (contexts.ForkRequest, b"\x33" * MIB, "request"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_holds_too_much_is_refused_by_name(attack: str) -> None:
    kind, data, name = ATTACKS[attack]
    assert len(data) >= MIB
    tracemalloc.start()
    try:
        assert refusal(kind, data)[0] == name
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()


def test_reading_takes_no_more_than_three_times_a_messages_size() -> None:
    """Of a process that reads each of them, by what its memory was at most."""
    program = textwrap.dedent("""
        import resource
        from types import SimpleNamespace
        from jaxctx.errors import InvalidArgument
        from jaxctx_server.service import request_reader
        from tests.server.validate import test_scan
        served = SimpleNamespace(limits=test_scan.LONG, model=object())
        def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        for name, (kind, data, _) in test_scan.ATTACKS.items():
            before = most()
            try:
                request_reader.scan(kind.DESCRIPTOR, served.limits, data)
                request_reader.parse_and_validate(kind.DESCRIPTOR, served, data)
            except InvalidArgument as error:
                assert most() - before < 2 * len(data), (name, most() - before)  # and the bytes themselves
            else:
                raise AssertionError(name)
        print("all refused")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().endswith("all refused"), done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",  # no tag
        b"\x0a",  # no size
        b"\x0a\x05ab",  # cut off
        b"\x0a\xff\xff\xff\xff\xff\x01",  # a size of six bytes
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x02\x00",  # field 0
        b"\x10" + b"\xff" * 10 + b"\x01",  # a number of eleven bytes
        b"\xff" * 5 + b"\x01\x00",  # a tag of six bytes
        b"\x0e\x00",  # a wire type that does not exist
        b"\x0f\x00",
        b"\x0b",  # a group
        b"\xf9\x07\x00",  # half of eight bytes
        b"\xfd\x07\x00",
        b"\x10",  # no number
        field(3, b"\x0a\x05a"),  # inside
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    assert refusal(contexts.FillRequest, data) == ("request", scan.NO_MESSAGE)


def test_at_the_limit_and_one_more() -> None:
    one = field(4, field(1, b"a"))
    scan.scan(sessions.SubmitCallRequest.DESCRIPTOR, LONG, one * 256)
    assert refusal(sessions.SubmitCallRequest, one * 257) == ("parameters", "must have 1 to 256 entries, not more")
    inside = field(4, field(2, b"x" * (2 * MIB + 1)))
    assert refusal(sessions.SubmitCallRequest, one * 7 + inside) == (
        "parameters[7].text",
        "must be text of up to 2097152 bytes, not 2097153",
    )
    unknown = b"\xf8\x07\x00"
    scan.scan(sessions.SubmitCallRequest.DESCRIPTOR, LONG, unknown * scan.MAX_UNKNOWN_FIELDS)
    assert refusal(sessions.SubmitCallRequest, unknown * (scan.MAX_UNKNOWN_FIELDS + 1))[0] == "request"


def test_a_scan_pauses_between_stretches() -> None:
    """So that a long one does not hold up others; and what the pause raises ends it."""
    pauses = list[int]()
    request = contexts.ForwardRequest(context_id="a", tokens=[1] * 10_000, masks=[{} for _ in range(10_000)])
    scan.scan(request.DESCRIPTOR, LONG, request.SerializeToString(), lambda: pauses.append(1))
    assert len(pauses) == 10_002 // scan.FIELDS_BETWEEN_PAUSES

    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        scan.scan(request.DESCRIPTOR, LONG, request.SerializeToString(), stop)
