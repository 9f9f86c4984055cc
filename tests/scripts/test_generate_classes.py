"""Classes of messages: what may be left out, what is a class at all, and that they go over and come back. And what
clients do by one call each.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx import codec, status

protoc = pytest.importorskip("grpc_tools.protoc")

ROOT = Path(__file__).resolve().parents[2]
PROTO = """
syntax = "proto3";
package jaxctx.v1;
import "google/protobuf/any.proto";
import "google/protobuf/descriptor.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/timestamp.proto";

extend google.protobuf.FieldOptions {
  FieldRules rule = 87310;
}
message FieldRules {
  bool id = 1;
  bool name = 2;
  uint32 min_bytes = 3;
  uint32 min_items = 4;
  bool ranges = 5;
  string excludes = 6;
}

service Radio {
  // Hear a station, NOT_FOUND if it is silent. Until another is tuned.
  rpc Tune(TuneRequest) returns (TuneResponse);
  rpc Retune(RetuneRequest) returns (RetuneResponse);
  rpc Hear(TuneRequest) returns (stream HearResponse);
  rpc ListStations(TuneRequest) returns (ListStationsResponse);
  rpc Close(CloseRequest) returns (CloseResponse);
  rpc ListSongs(ListSongsRequest) returns (ListStationsResponse);
  rpc Tell(TellRequest) returns (TellResponse);
  rpc Play(PlayRequest) returns (PlayResponse);
}
enum Band {
  BAND_UNSPECIFIED = 0;
  // Long waves.
  BAND_LONG = 1;
  BAND_SHORT_WAVE = 2;
}
message TuneRequest {
  // How loud.
  Volume volume = 1;
  optional Band band = 2;
  google.protobuf.Duration pin_for = 3;
  string name = 4;
}
message RetuneRequest {
  string name = 1;
  repeated string others = 2;
  double loudness = 3;
}
// Asks to plan an evening.
message PlanRequest {
  string place = 1 [(rule).id = true];
  // Unset: anywhere.
  optional string other = 2 [(rule).id = true];
  repeated string names = 3 [(rule).min_items = 1];
  repeated string notes = 4 [(rule).min_bytes = 1];
  // How often. Unset: 3.
  optional int32 times = 5;
  // How loud. Unset: 0.5 (low).
  optional double volume = 6;
  // Where it starts. Unset: 12 o'clock.
  optional string start = 7;
  Hush first = 8;
  // Unset: none.
  Hush second = 9;
  Pair pair = 20;
  // For how long. Unset: 60 seconds.
  google.protobuf.Duration rest = 10;
  repeated Hours hours = 11;
  // Unset: as they are.
  Notes labels = 12;
  bool quiet = 13;
  repeated Pair pairs = 14;
  // Unset: none.
  Order order = 15;
  // Unset: any.
  Band band = 19;
  oneof what {
    string text = 16 [(rule).min_bytes = 1];
    string file = 17;
  }
  string left = 18;
}
enum Order {
  ORDER_UNSPECIFIED = 0;
  ORDER_LATE = 1;
  ORDER_EARLY = 5;
}
message Hush {
  bool now = 1;
}
message Hours {
  repeated int32 bounds = 1 [(rule).ranges = true];
}
message Notes {
  map<string, string> notes = 1;
}
message Volume {
  // Not used.
  double loudness = 1;
  // In meters.
  int32 distance = 2;
}
// Two values that belong together.
message Pair {
  string first = 1;
  int64 second = 2;
}
// A place on the dial.
message Station {
  // What it is called.
  string name = 1;
  // Who pays. Empty: nobody.
  string payer = 2;
  // Listeners. 0: not known.
  int64 listeners = 3;
  // Since when it sends.
  google.protobuf.Timestamp since = 4;
  // When it ends. Unset: never.
  google.protobuf.Timestamp until = 5;
  google.protobuf.Duration duration = 6;
  Band band = 7;
  // Where else. Unset: nowhere.
  Band other = 8;
  optional double drift = 9;
  map<string, double> powers = 10;
  repeated Pair pairs = 11;
  repeated Band bands = 12;
  google.protobuf.Any extra = 13;
  // A comment that is far too long to stand behind the field that it is on, so that it goes in lines before it instead.
  bool stereo = 14;
  Quality quality = 15;
  message Quality {}
}
message TuneResponse {
  Station station = 1;
  bool clear = 2;
}
// Not written: its fields are those of TuneResponse.
message RetuneResponse {
  Station station = 1;
  bool clear = 2;
}
// What is heard. There is more of it every second, and all of it would not fit on a line that has one hundred and
// twenty.
//
// One thing at a time.
message HearResponse {
  // Text or more.
  oneof heard {
    string text = 1;
    Station next = 2;
    Band band = 3;
  }
  oneof told {
    string joke = 4;
    string news = 5;
  }
}
message ListStationsResponse {
  repeated Station stations = 1;
  string next_page_token = 2;
}
message CloseRequest {
  // Which. Empty: all.
  string name = 1;
}
message CloseResponse {}
message ListSongsRequest {
  string band = 1;
  int32 limit = 2;
  string page_token = 3;
}
message TellRequest {
  string context_id = 1;
  // Whom to tell it.
  Pair pair = 2;
  // How loud it is told. Unset: as before.
  optional bool loud = 3;
}
message PlayRequest {
  oneof content {
    string text = 1 [(rule).min_bytes = 1];
    Hush tokens = 2;
    Hush messages = 3;
  }
  optional bool add_special_tokens = 4;
  // Play it again and again.
  bool loop = 5;
  repeated Hush outputs = 6;
  string salt = 7 [(rule).excludes = "context_id"];
}
message PlayResponse {
  repeated string heard = 1;
  int32 times = 2;
}
message TellResponse {
  repeated string heard = 1;
}
// Why nothing is heard:
//
// - NOT_FOUND: there is no such
//   station.
// - ABORTED: somebody else tuned.
//
// Nothing is charged then.
enum ErrorReason {
  // Never sent.
  ERROR_REASON_UNSPECIFIED = 0;
  // ABORTED: another station was tuned.
  ERROR_REASON_RETUNED = 1;
  // DATA_LOSS: it rustles. It was
  // not played.
  ERROR_REASON_STATIC = 2;
  // NOT_FOUND: silent.
  ERROR_REASON_SILENT = 3;
  // NOT_FOUND: off the dial.
  ERROR_REASON_OFF_THE_DIAL = 4;
  // ABORTED: switched off.
  ERROR_REASON_OFF = 5;
}
"""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load("generate_classes", ROOT / "scripts" / "generate_classes.py")


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it loads
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the generator wrote to."""
    (tmp_path / "radio.proto").write_text(PROTO)
    included = Path(protoc.__file__).parent / "_proto"
    arguments = [f"--proto_path={tmp_path}", f"--proto_path={included}", "--include_imports", "--include_source_info"]
    assert protoc.main(["", *arguments, f"--descriptor_set_out={tmp_path / 'set'}", "radio.proto"]) == 0
    options = {
        "TuneOptions": ("TuneRequest", ("name",)),
        "Content": ("PlayRequest", ("text", "loop", "outputs", "salt")),
        "RetuneOptions": ("RetuneRequest", ("name",)),
    }
    monkeypatch.setattr(generator, "OPTIONS", options)
    monkeypatch.setattr(generator, "FILLED", {"RetuneOptions": "Another station, and what it plays."})
    monkeypatch.setattr(generator, "LISTED", {"Quiet": "Hush"})
    monkeypatch.setattr(generator, "REQUESTS", {"Evening": ("PlanRequest", ("left",))})
    monkeypatch.setattr(generator, "STORED", {"StationFields": ("Station", ("since", "until", "seconds"))})
    monkeypatch.setattr(generator, "ORDERED", ("Order",))
    calls = {
        "Tune": generator.Operation("tune", "name", "TuneOptions"),
        "Retune": generator.Operation("retune", "name"),
        "ListStations": generator.Operation("stations", options="TuneOptions"),
        "ListSongs": generator.Operation("songs", is_listing=True),
        "Tell": generator.Operation("tell", "first"),
        "Play": generator.Operation("play", "text", generator.CONTENT),
        "Close": generator.Operation("close", "name"),
    }
    made_by = {
        "Retune": generator.Operation("retune", "name"),
        "ListStations": generator.Operation("stations", is_listing=True),
        "Play": generator.Operation("play", "text", generator.CONTENT, is_look=True),
    }
    operations = {
        "RadioCalls": ("Of a radio.", "    _link: Link", "self._link.ask", calls),
        "SetCalls": ("Of what makes radios.", "    _link: Link", "self._link.ask", made_by),
    }
    monkeypatch.setattr(generator, "OPERATIONS", operations)
    made_of = {"TuneResult": ("Radio", "_radio"), "Station": ("Place", "_place")}
    monkeypatch.setattr(generator, "MADE", {"SetCalls": made_of})
    monkeypatch.setattr(generator, "READ", {"RadioCalls": ("Station", ("name", "until"))})
    of_engine = {
        "Tune": ("tune", ("name", "band")),
        "Tell": ("tell", ("loud", "Evening")),
        "ListStations": ("stations", ()),
        "Close": ("close", ("name",)),
    }
    of_any = {rpc: of_engine[rpc] for rpc in ("Tune", "Tell", "Close")} | {"Hear": ("hear", ("name",))}
    engine = {"Played": ("What is played.", of_engine), "Asked": ("What is asked.", of_any)}
    monkeypatch.setattr(generator, "ENGINE_CALLS", engine)
    monkeypatch.setattr(generator, "REMOTE_CALLS", {"Asked": ("Remote", generator.REMOTE_CALLS["ProgramCalls"][1])})
    generator.main(str(tmp_path / "set"), str(tmp_path))
    return tmp_path


def test_what_has_a_class(made: Path) -> None:
    answers = load("radio_answers", made / "answers.py")
    assert answers.__all__ == ["Band", "HearResult", "PlayResult", "Station", "StationQuality", "TuneResult"]
    names = {name.removeprefix("jaxctx.v1."): kind.__name__ for name, kind in answers.CLASSES.items()}
    assert names == {
        "Band": "Band",
        "Pair": "tuple",
        "Station": "Station",
        "Station.Quality": "StationQuality",
        "TuneResponse": "TuneResult",
        "RetuneResponse": "TuneResult",
        "HearResponse": "HearResult",
        "PlayResponse": "PlayResult",
    }
    assert [(each.name, each.value) for each in answers.Band] == [("LONG", "long"), ("SHORT_WAVE", "short_wave")]


def test_fields_and_what_may_be_left_out(made: Path) -> None:
    answers = load("radio_answers", made / "answers.py")
    needed: dict[str, Any] = {"name": "a", "since": datetime(2026, 1, 1, tzinfo=UTC), "seconds": 1.5}
    needed |= {"band": answers.Band.LONG, "extra": AnyMessage(), "stereo": True, "quality": answers.StationQuality()}
    station = answers.Station(**needed)
    for name in needed:
        with pytest.raises(TypeError, match=name):
            answers.Station(**{each: value for each, value in needed.items() if each != name})
    assert (station.payer, station.listeners, station.until, station.other, station.drift) == ("", 0, None, None, None)
    assert (station.powers, station.pairs, station.bands) == ({}, (), ())
    hints = get_type_hints(answers.Station)
    assert hints["extra"] is Message
    assert hints["powers"] == Mapping[str, float]
    assert hints["pairs"] == Sequence[tuple[str, int]]
    heard = get_type_hints(answers.HearResult)
    assert heard["heard"] == str | answers.Station | answers.Band | None
    assert (heard["joke"], heard["news"]) == (str | None, str | None)  # else nobody could tell which it is


def test_requests(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = load("radio_answers", made / "answers.py")
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", answers)
    requests = load("radio_requests", made / "requests.py")
    assert requests.__all__ == ["Evening", "Hush", "Order"]
    needed: dict[str, Any] = {"place": "here", "names": ["a"], "pair": ("a", 1)}
    evening = requests.Evening(**needed)
    for name in needed:
        with pytest.raises(TypeError, match=name):
            requests.Evening(**{each: value for each, value in needed.items() if each != name})
    assert (evening.other, evening.notes, evening.times, evening.volume, evening.start) == (None, (), 3, 0.5, None)
    assert (evening.first, evening.second, evening.rest_s) == (requests.Hush(False), None, 60.0)
    assert (evening.hours, evening.labels, evening.quiet, evening.pairs, evening.band) == ((), None, False, (), None)
    assert (evening.text, evening.file, evening.order, hasattr(evening, "left")) == (None, None, None, False)
    assert requests.Order.EARLY > requests.Order.LATE
    hints = get_type_hints(requests.Evening)
    assert hints["hours"] == Sequence[Sequence[tuple[int, int]]]
    assert hints["labels"] == Mapping[str, str] | None
    assert hints["band"] == answers.Band | None
    assert (hints["times"], hints["volume"], hints["rest_s"]) == (int, float, float)


def test_comments(made: Path) -> None:
    source = (made / "answers.py").read_text()
    assert '\n    LONG = "long"  # long waves\n    SHORT_WAVE = "short_wave"\n' in source
    assert "\n    until: datetime | None = None  # when it ends. None: never\n" in source
    long = "A comment that is far too long to stand behind the field that it is on, so that it goes in lines before it"
    assert f"\n    # {long}\n    # instead.\n    stereo: bool\n" in source
    text = "There is more of it every second, and all of it would not fit on a line that has one hundred and twenty."
    assert f'\n    """What is heard.\n\n    {text}\n\n    One thing at a time.\n    """\n' in source
    assert max(map(len, source.splitlines())) <= 120


def test_fields_that_are_extended(made: Path) -> None:
    stored = load("radio_stored", made / "stored.py")
    assert stored.__all__ == ["Band", "StationFields", "StationQuality"]

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Kept(stored.StationFields):  # type: ignore[misc, name-defined]
        stereo: bool = False
        since: float

    needed: dict[str, Any] = {"name": "a", "band": stored.Band.LONG, "extra": None, "quality": stored.StationQuality()}
    needed |= {"since": 1.5}
    kept = Kept(**needed)
    for name in needed:
        with pytest.raises(TypeError, match=name):
            Kept(**{each: value for each, value in needed.items() if each != name})
    assert (kept.payer, kept.listeners, kept.stereo, hasattr(kept, "until")) == ("", 0, False, False)
    assert stored.StationFields.__eq__ is object.__eq__, "whoever extends it says what is equal"


def test_options(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", load("radio_answers", made / "answers.py"))
    options = load("radio_options", made / "options.py")
    assert [*options.TuneOptions.__annotations__] == ["loudness", "distance", "band", "pin_s"]
    assert options.Band is sys.modules["jaxctx.v1.answers"].Band
    content = ["tokens", "messages", "add_special_tokens"]
    assert [*options.Content.__annotations__] == content
    assert {*options.RetuneOptions.__annotations__} == {*content, "others", "loudness"}
    assert options.RetuneOptions.__doc__ == "Another station, and what it plays."
    assert (
        "loudness: float | None  # how loud\n    distance: int | None  # in meters\n"
        in (made / "options.py").read_text()
    )


def test_two_classes_of_one_name_are_refused(
    generator: ModuleType, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generator.NAMES, "TuneResponse", "Station")
    with pytest.raises(ValueError, match="second Station"):
        generator.main(str(made / "set"), str(made))


def test_they_go_over_and_come_back(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = load("radio_answers", made / "answers.py")
    monkeypatch.setattr(codec, "_TYPES", codec._TYPES | answers.CLASSES)
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((made / "set").read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    heard = GetMessageClass(pool.FindMessageTypeByName("jaxctx.v1.HearResponse"))
    tuned = GetMessageClass(pool.FindMessageTypeByName("jaxctx.v1.TuneResponse"))
    empty = codec.decode(tuned(), answers.TuneResult)
    assert (empty.clear, empty.station.since.year, empty.station.until) == (False, 1970, None)
    needed: dict[str, Any] = {"name": "a", "since": datetime(2026, 1, 1, tzinfo=UTC), "seconds": 1.5, "stereo": True}
    needed |= {"band": answers.Band.LONG, "bands": (answers.Band.SHORT_WAVE,), "powers": {"w": 0.5}, "drift": 0.0}
    needed |= {"extra": empty.station.extra, "quality": answers.StationQuality(), "pairs": (("a", 1),)}
    station = answers.Station(**needed, until=datetime(2027, 1, 1, tzinfo=UTC), other=answers.Band.LONG)
    for value in ("", "x", station, answers.Band.SHORT_WAVE, None):
        told = answers.HearResult(heard=value, news="n")
        message = codec.encode(told, heard)
        assert codec.decode(heard.FromString(message.SerializeToString()), answers.HearResult) == told
    result = answers.TuneResult(station=station, clear=True)
    assert codec.decode(codec.encode(result, tuned), answers.TuneResult) == result


async def test_operations(made: Path, generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", load("radio_answers", made / "answers.py"))
    monkeypatch.setitem(sys.modules, "jaxctx.v1.options", load("radio_options", made / "options.py"))
    radio = load("radio_operations", made / "operations.py").RadioCalls
    assert {
        name: str(inspect.signature(getattr(radio, name)))
        for name in ("tune", "retune", "stations", "songs", "tell", "play")
    } == {
        "tune": "(self, name: 'str', *, loudness: 'float | None' = None, distance: 'int | None' = None,"
        " band: 'Band | None' = None, pin_s: 'float | None' = None, timeout_s: 'float | None' = None)"
        " -> 'TuneResult'",
        "retune": "(self, name: 'str', *, others: 'Sequence[str]' = (), loudness: 'float' = 0.0,"
        " timeout_s: 'float | None' = None) -> 'TuneResult'",
        "stations": "(self, *, name: 'str' = '', loudness: 'float | None' = None, distance: 'int | None' = None,"
        " band: 'Band | None' = None, pin_s: 'float | None' = None, timeout_s: 'float | None' = None)"
        " -> 'list[Station]'",
        "songs": "(self, *, band: 'str' = '', page: 'int' = 100, timeout_s: 'float | None' = None)"
        " -> 'AsyncIterator[Station]'",
        "tell": "(self, first: 'str', *, second: 'int' = 0, loud: 'bool | None' = None,"
        " timeout_s: 'float | None' = None) -> 'list[str]'",
        "play": "(self, text: 'str | None' = None, *, loop: 'bool' = False, outputs: 'Sequence[Quiet]' = (),"
        " salt: 'str' = '',"
        " tokens: 'bool | None' = None, messages: 'bool | None' = None, add_special_tokens: 'bool | None' = None,"
        " timeout_s: 'float | None' = None) -> 'PlayResult'",
    }
    assert inspect.getdoc(radio.tune) == "Hear a station, NotFound if it is silent. Until another is tuned."
    assert "`loud`: how loud it is told. None: as before." in radio.tell.__doc__
    assert inspect.getdoc(radio.name) == "What it is called."
    assert get_type_hints(radio.until.fget, {"datetime": datetime})["return"] == datetime | None

    class Link:
        async def call(self, *told: object, **fields: object) -> tuple[str, ...]:
            asked.append((*told, fields))
            return ("heard",)

        ask = call

    asked: list[Any] = []
    own = radio()
    own._link = Link()
    own.info = SimpleNamespace(name="here")
    assert own.name == "here"
    assert await own.tell("a", second=2, timeout_s=1.5) == ["heard"]
    assert await own.close() is None
    pair = {"first": "a", "second": 2}
    assert asked == [("Tell", 1.5, {"pair": pair, "loud": None}), ("Close", None, {"name": ""})]
    options = sys.modules["jaxctx.v1.options"]
    assert await own.play(tokens=[1], outputs=[options.Quiet(now=True)]) == ("heard",)
    assert asked[2][:2] == ("Play", None)
    sent = {name: value for name, value in asked[2][3].items() if value}
    assert sent == {"tokens": {"ids": [1]}, "outputs": [{"now": True}]}


async def test_operations_that_make_something(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", load("radio_answers", made / "answers.py"))
    monkeypatch.setitem(sys.modules, "jaxctx.v1.options", load("radio_options", made / "options.py"))
    calls = load("radio_operations", made / "operations.py").SetCalls

    class Link:
        async def ask(self, *told: object, **fields: object) -> object:
            return told, fields

        async def items(self, *told: object, **fields: object) -> AsyncIterator[object]:
            yield told, fields

    class Set(calls):  # type: ignore[misc, valid-type]
        _link, id = Link(), "here"

        def _radio(self, told: object) -> object:
            return "radio", told

        def _place(self, told: object) -> object:
            return "place", told

    answers = sys.modules["jaxctx.v1.answers"]
    assert inspect.signature(calls.retune).return_annotation == "Radio"
    made_of = {"name": "a", "others": (), "loudness": 2.0}
    asked = ("Retune", 1.5, answers.TuneResult)
    assert await Set().retune("a", loudness=2.0, timeout_s=1.5) == ("radio", (asked, made_of))
    assert inspect.signature(calls.stations).return_annotation == "AsyncIterator[Place]"
    (found,) = [each async for each in Set().stations(page=3)]
    assert found[0] == "place"
    assert found[1][0] == ("ListStations", None, answers.Station)
    assert found[1][1]["limit"] == 3
    assert {"loop", "outputs", "salt"} & {*inspect.signature(calls.play).parameters} == {"loop", "outputs"}
    played: Any = await Set().play("a")
    assert (played[0][0], played[1]["context_id"], played[1]["text"]) == ("Play", "here", "a")


def test_calls_of_an_engine(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = load("radio_answers", made / "answers.py")
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", answers)
    monkeypatch.setitem(sys.modules, "jaxctx.v1.requests", load("radio_requests", made / "requests.py"))
    calls = load("radio_calls", made / "engine_calls.py").Played
    assert inspect.getdoc(calls) == "What is played."
    assert {name: str(inspect.signature(getattr(calls, name))) for name in ("tune", "tell", "stations", "close")} == {
        "tune": "(self, caller: 'Caller', name: 'str', band: 'Band | None' = None) -> 'TuneResult'",
        "tell": "(self, caller: 'Caller', loud: 'bool | None', request: 'Evening') -> 'Sequence[str]'",
        "stations": "(self, caller: 'Caller') -> 'Sequence[Station]'",
        "close": "(self, caller: 'Caller', name: 'str') -> 'None'",
    }
    assert inspect.getdoc(calls.tune) == "Hear a station, NotFound if it is silent. Until another is tuned."
    assert get_type_hints(calls.stations)["return"] == Sequence[answers.Station]


def test_calls_of_an_engine_elsewhere(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxctx.v1.answers", load("radio_answers", made / "answers.py"))
    monkeypatch.setitem(sys.modules, "jaxctx.v1.requests", load("radio_requests", made / "requests.py"))
    calls, asked = load("radio_calls", made / "engine_calls.py"), []
    monkeypatch.setattr(calls, "decode", lambda message, kind: (kind.__name__, message), raising=False)

    class Radio(calls.Remote):
        async def ask(self, rpc: str, caller: object, request: object = None, /, **fields: object) -> object:
            asked.append((rpc, caller, request, fields))
            return SimpleNamespace(heard=("good", "evening"))

        @asynccontextmanager
        async def begun(self, *args: object, **fields: object) -> AsyncIterator[object]:
            await self.ask(*args, **fields)

            async def responses() -> AsyncIterator[str]:
                yield "good"
                yield "night"

            yield responses()

    radio = Radio()
    assert inspect.getdoc(calls.Remote) == "What is asked, in another process."
    assert asyncio.run(radio.tune("me", "news", None))[0] == "TuneResult"
    assert asyncio.run(radio.tell("me", True, "evening")) == ["good", "evening"]
    assert asyncio.run(radio.close("me", "news")) is None

    async def hear() -> list[object]:
        return [each async for each in radio.hear("me", "news")]

    assert asyncio.run(hear()) == [("HearResult", "good"), ("HearResult", "night")]
    assert asked == [
        ("Tune", "me", None, {"name": "news", "band": None}),
        ("Tell", "me", "evening", {"loud": True}),
        ("Close", "me", None, {"name": "news"}),
        ("Hear", "me", None, {"name": "news"}),
    ]


def test_services_by_name(made: Path) -> None:
    text = (made / "services.py").read_text("utf-8")
    assert '    "Radio": radio_pb2.DESCRIPTOR.services_by_name["Radio"],' in text
    assert '    "Radio": radio_pb2_grpc.add_RadioServicer_to_server,' in text
    assert '    "Tell": ("tell", ["loud", requests.Evening]),' in text


def test_errors(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BY_CODE", {})
    errors = load("radio_errors", made / "errors.py")
    assert errors.__all__ == ["Aborted", "DataLoss", "NotFound"]
    assert {name: kind.__name__ for name, kind in status.BY_CODE.items()} == {
        "ABORTED": "Aborted",
        "DATA_LOSS": "DataLoss",
        "NOT_FOUND": "NotFound",
    }
    assert [kind("why").reason for kind in status.BY_CODE.values()] == ["RETUNED", "STATIC", "SILENT"]
    assert inspect.getdoc(errors.DataLoss) == "It rustles. It was not played."
    assert (
        inspect.getdoc(errors.NotFound) == "There is no such station.\n\nSILENT: silent.\n\nOFF_THE_DIAL: off the dial."
    )


def test_lines_are_broken_as_a_formatter_does(generator: ModuleType) -> None:
    assert generator.wrapped("    function(", ["a", "b"], ")") == "    function(a, b)"
    some, many = ["a" * 50, "b" * 58], ["a" * 50, "b" * 58, "c" * 9]
    assert generator.wrapped("    function(", some, ")") == f"    function(\n        {some[0]}, {some[1]}\n    )"
    lines = "".join(f"        {each},\n" for each in many)
    assert generator.wrapped("    function(", many, ")") == f"    function(\n{lines}    )"
