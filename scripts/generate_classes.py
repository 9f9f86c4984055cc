#!/usr/bin/env python3
"""The contract as plain Python: dataclasses of what is asked and answered, what callers may choose by keyword, the
operations of clients and of engines that are one call each, and the errors that these end with. And the fields of the
store's records.

    scripts/generate_classes.py DESCRIPTOR_SET FOLDER

Writes answers.py, requests.py, options.py, operations.py, engine_calls.py, services.py, errors.py and stored.py into
FOLDER, from what `protoc --descriptor_set_out --include_source_info --include_imports` says of protos/, comments
included; `scripts/stubs` runs it. A message answers if a method responds with it or with what holds it. Of a response
with one field, or with a part of a list, only what it holds has a class. A message of two plain values is a tuple,
one of a map or of ranges is what it holds, and responses of the same fields are one class.

A field of an answer may be left out if it is repeated, in a oneof or `optional`, or if its comment says what it means
that it is unset, empty or 0: that is its default then, and None is unset. One of a request must be there only if its
rules let it not be empty; if its comment says which number is meant where it is unset, that is its default. Any option
may be left out. An argument of an operation that is given by place must be there unless it is `optional`, its comment
says what it means that it is empty, or another may stand in its place.

Errors are one class for each gRPC status, as the comments on the reasons say which goes with each.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor_pb2 import (
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

NAMES = {  # of classes and fields that are not the contract's; else a response is a result: FillResponse, FillResult
    "ApplyChatTemplateResponse": "RenderedChat",
    "CompareResponse": "Comparison",
    "Context": "ContextInfo",  # a Context is the client's
    "ContextChange": "Change",
    "GenerateResponse": "GeneratePiece",
    "Session": "SessionInfo",
    "Variable": "VariableInfo",
    "WatchContextsResponse": "ContextEvent",
    "duration": "seconds",
    "pin_for": "pin_s",
}
METHODS = {  # of each class that has these fields
    ("text",): """
    def __str__(self) -> str:
        return self.text""",
    ("resident", "restored"): '''
    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return self.resident + self.restored''',
}
ERROR_METHODS = {  # of each class of these
    "InvalidArgument": '''
    @classmethod
    def field(cls, field: str, description: str) -> "InvalidArgument":
        """The common case: one field, one reason."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])''',
}
REQUESTS = {  # by class: the message whose fields they are, and those that whoever takes it gets in another way
    "CreateRequest": ("CreateContextRequest", ("model_id",)),
    "UpdateRequest": ("UpdateContextRequest", ("context_id",)),
    "GenerateRequest": ("GenerateRequest", ()),
    "ForwardRequest": ("ForwardRequest", ()),
    "SaveRequest": ("SaveRequest", ()),
    "OpenRequest": ("OpenRequest", ()),
    "Changes": ("UpdateSnapshotRequest", ("name", "version")),
    "SubmitCallRequest": ("SubmitCallRequest", ("session_id",)),
}
CONTENT = "Content"  # of the options: what these fields are is given by place if it is a text
OPTIONS = {  # by class: the message whose fields they are, and those that a caller gives in another way
    CONTENT: ("FillRequest", ("context_id", "text", "defer")),
    "SamplingOptions": ("Sampling", ()),
    "GenerateOptions": ("GenerateRequest", ("context_id", "n")),
    "CreateOptions": ("CreateContextRequest", ()),
    "OpenOptions": ("OpenRequest", ("name", "version")),
    "UpdateOptions": ("UpdateContextRequest", ("context_id",)),
    "SaveOptions": ("SaveRequest", ("context_id", "name")),
    "KeepOptions": ("PublishRequest", ("context_id",)),
    "CallOutputOptions": ("CallOutput", ()),
}
FILLED = {"CreateOptions": "A new context, and what is in it at once."}  # options that content is among: what they say
STORED = {  # by class: the message whose fields they are, and those that whoever extends it has in another way
    "VersionFields": ("StoredVersion", ("expires_at", "ttl_s", "sliding")),
    "LineageFields": (
        "StoredManifest",
        ("id", "tokens", "marks", "packs", "page_keys", "page_checksums", "page_packs", "page_offsets"),
    ),
}


class Operation(NamedTuple):
    """A method of a client that calls one of the contract's."""

    name: str
    by_place: str = ""  # the field whose argument is given by place
    options: str = ""  # the class in OPTIONS of fields that are chosen by keyword; None leaves each to the server
    is_listing: bool = False  # whether a list that comes in parts is iterated over; else it is there at once
    is_look: bool = False  # whether it asks of a context what others may write to meanwhile


OPERATIONS = {  # by class: what it says of itself, what its methods need, how they ask, and they by those they call
    "ContextCalls": (
        """Operations on a context that are one call each, and its counters as of the last answer.""",
        '''
    id: str
    _link: Link

    @property
    @abstractmethod
    def info(self) -> ContextInfo:
        """All that was told of it."""

    @abstractmethod
    async def _change(self, method: str, timeout_s: float | None, kind: type[T], /, **fields: Any) -> T:
        """Call a method that writes to this context; what comes, as an answer of this class."""''',
        "self._change",
        {
            "Fill": Operation("fill", "text", CONTENT),
            "Flush": Operation("flush"),
            "Forward": Operation("forward", "tokens"),
            "Truncate": Operation("truncate", "tokens"),
            "Rewind": Operation("rewind", "to"),
            "ReservePages": Operation("reserve", "pages"),
            "CommitPages": Operation("commit", "pages"),
            "ReleasePages": Operation("release", "pages"),
            "UpdateContext": Operation("update", options="UpdateOptions"),
            "Save": Operation("save", "name", "SaveOptions"),
            "Publish": Operation("publish", options="KeepOptions"),
            "Plan": Operation("plan", "text", CONTENT, is_look=True),
        },
    ),
    "ServerCalls": (
        """Operations on a server that are one call each.""",
        '''
    _link: Link

    @abstractmethod
    def _context(self, info: ContextInfo) -> ContextT:
        """A context of which this is known."""

    @abstractmethod
    def _opened(self, opened: FillResult) -> ContextT:
        """A context that was opened, which tells where its KV came from."""

    @abstractmethod
    def _session(self, info: SessionInfo) -> SessionT:
        """A session of which this is known."""''',
        "self._link.ask",
        {
            "CreateContext": Operation("_create", options="CreateOptions"),
            "ListContexts": Operation("contexts", is_listing=True),
            "Open": Operation("open", "name", "OpenOptions"),
            "Take": Operation("take", "name", "OpenOptions"),
            "Plan": Operation("plan", "text", CONTENT),
            "GetSnapshot": Operation("snapshot", "name"),
            "ListSnapshots": Operation("snapshots", is_listing=True),
            "ListSnapshotVersions": Operation("history", "name"),
            "UpdateSnapshot": Operation("update_snapshot", "name", "KeepOptions"),
            "DeleteSnapshot": Operation("delete_snapshot", "name"),
            "ListPublications": Operation("publications"),
            "UpdatePublication": Operation("update_publication", "publication_id", "KeepOptions"),
            "Unpublish": Operation("unpublish", "publication_id"),
            "ListModels": Operation("models"),
            "GetModel": Operation("model", "model_id"),
            "Tokenize": Operation("tokenize", "text"),
            "Detokenize": Operation("detokenize", "tokens"),
            "ApplyChatTemplate": Operation("apply_chat_template", "messages"),
            "GetStats": Operation("engines"),
            "Drain": Operation("drain"),
            "ClearCache": Operation("clear_cache"),
            "CreateSession": Operation("create_session", "session_id"),
            "GetSession": Operation("session", "session_id"),
            "ListSessions": Operation("sessions", is_listing=True),
        },
    ),
    "SessionCalls": (
        """Operations on a session that are one call each.""",
        '''
    _link: Link

    @abstractmethod
    def _variable(self, info: VariableInfo) -> VariableT:
        """A variable of which this is known."""''',
        "self._link.ask",
        {
            "GetSession": Operation("info"),
            "CreateVariable": Operation("create_variable", "name"),
            "ListVariables": Operation("variables", is_listing=True),
            "CancelCall": Operation("cancel", "call_id"),
            "GetGraph": Operation("graph"),
        },
    ),
    "VariableCalls": (
        """Operations on a variable that are one call each.""",
        "    _link: Link",
        "self._link.ask",
        {
            "GetVariable": Operation("look"),
            "SetVariable": Operation("set", "text"),
        },
    ),
}
MADE = {  # by class of operations and class of answers: what the client makes of these, and its method that does
    "ServerCalls": {
        "ContextInfo": ("ContextT", "_context"),
        "FillResult": ("ContextT", "_opened"),
        "SessionInfo": ("SessionT", "_session"),
    },
    "SessionCalls": {"VariableInfo": ("VariableT", "_variable")},
}
READ = {  # by class of operations: the message whose fields can be read there, and which of them
    "ContextCalls": ("Context", ("seq_len", "buffered_tokens", "page_size", "engine_id")),
}
ENGINE_CALLS = {  # by protocol: what it says, and by calls of the contract its methods and what they take of requests
    "ProgramCalls": (
        "What programs have an engine do by one call of the contract.",
        {
            "CreateContext": ("create", ("CreateRequest",)),
            "UpdateContext": ("update", ("context_id", "UpdateRequest")),
            "Rewind": ("rewind", ("context_id", "to")),
            "CloseContext": ("close", ("context_id",)),
            "Generate": ("generate", ("GenerateRequest",)),
            "ClearCache": ("clear_cache", ()),
        },
    ),
    "EngineCalls": (
        "What clients have an engine do by one call of the contract.",
        {
            "Fork": ("fork", ("context_id", "child_ids", "n")),
            "Truncate": ("truncate", ("context_id", "tokens")),
            "Forward": ("forward", ("ForwardRequest",)),
            "ReservePages": ("reserve_pages", ("context_id", "pages")),
            "CommitPages": ("commit_pages", ("context_id", "pages")),
            "ReleasePages": ("release_pages", ("context_id", "pages")),
            "GetContext": ("inspect", ("context_id", "include_pages", "include_tokens", "include_ancestors")),
            "ListContexts": ("list", ("page_token", "limit", "include_program_contexts")),
            "WatchContexts": ("watch", ("include_program_contexts",)),
            "Compare": ("compare", ("a", "b")),
            "Save": ("save", ("SaveRequest",)),
            "Open": ("open", ("OpenRequest",)),
            "Take": ("take", ("OpenRequest",)),
            "GetSnapshot": ("snapshot", ("name", "version")),
            "ListSnapshots": ("snapshots", ("prefix", "page_token", "limit")),
            "ListSnapshotVersions": ("history", ("name",)),
            "UpdateSnapshot": ("update_snapshot", ("name", "version", "Changes")),
            "DeleteSnapshot": ("delete_snapshot", ("name", "version")),
            "Publish": ("publish", ("context_id", "Changes")),
            "UpdatePublication": ("update_publication", ("publication_id", "Changes")),
            "Unpublish": ("unpublish", ("publication_id",)),
            "ListPublications": ("publications", ()),
        },
    ),
}
REMOTE_CALLS = {  # by protocol: the class that asks an engine in another process for its methods, and how it does
    "ProgramCalls": (
        "RemoteCalls",
        '''
    @abstractmethod
    async def ask(self, rpc: str, caller: Caller, request: object = None, /, **fields: Any) -> Any:
        """Call a method with these fields and those of `request`; its response."""

    @abstractmethod
    def begun(
        self, rpc: str, caller: Caller, request: object = None, /, **fields: Any
    ) -> AbstractAsyncContextManager[Any]:
        """The same as a call under way, which ends with the block; one that is streamed is iterated over."""''',
    ),
}
GIVEN = ("context_id", "session_id", "variable_id", "limit", "page_token")  # no arguments of these, but by place
ERRORS = {each.name: each.name.title().replace("_", "") for each in grpc.StatusCode}  # as the client calls them
LISTED = {"Output": "PassOutput"}  # options that come in lists: by dataclass the message, in which messages are options
SECONDS = {"duration": "ttl_s", "pin_for": "pin_s", "ttl": "ttl_s"}  # what durations are called there
ORDERED = ("Criterion",)  # enums whose members can be compared, by the contract's numbers
PACKAGE = ".jaxctx.v1."
KNOWN = {".google.protobuf.Timestamp": "datetime", ".google.protobuf.Duration": "float"}
SCALARS = {"STRING": "str", "BYTES": "bytes", "BOOL": "bool", "DOUBLE": "float", "FLOAT": "float"}  # the others are int
EMPTY = {"str": '""', "bytes": 'b""', "bool": "False", "float": "0.0", "int": "0"}
IMPORTS = {  # and what shows that they are needed
    "import ": r"\benum(?=\.)",
    "from abc import ": r"(?<=@)abstractmethod",
    "from collections.abc import ": r"\b(?:AsyncIterator|Mapping|Sequence)(?=\[)",
    "from contextlib import ": r"AbstractAsyncContextManager(?=\[)",
    "from dataclasses import ": r"asdict(?=\()|dataclass(?=\()|(?<== )field(?=\()",
    "from datetime import ": r"(?<=: )datetime|(?<=\[)datetime",
    "from typing import ": r"(?<=: )Any\b|Generic(?=\[)|TypedDict|TypeVar",
    "\nfrom google.protobuf.message import ": r"(?<=[:|] )Message\b|(?<=\[)Message\b",
}
WIDTH = 120

Rules = Callable[[FieldDescriptorProto], Any]  # those of a field


class Type(NamedTuple):
    """A message or an enum, and the comments on it: (), on its fields or values: (2, index), on oneofs: (8, index)."""

    name: str
    proto: Any
    comments: dict[tuple[int, ...], str]

    @property
    def is_enum(self) -> bool:
        return isinstance(self.proto, EnumDescriptorProto)

    @property
    def is_map(self) -> bool:
        """Whether it is what a map consists of."""
        return not self.is_enum and bool(self.proto.options.map_entry)

    @property
    def only(self) -> FieldDescriptorProto | None:
        """Its field, if it has just one."""
        return None if self.is_enum or len(self.proto.field) != 1 else self.proto.field[0]

    @property
    def is_pair(self) -> bool:
        """Whether it has two plain values and nothing else."""
        plain = [] if self.is_enum else [each.label == 1 and not each.type_name for each in self.proto.field]
        return plain == [True, True] and not self.proto.oneof_decl


class Field(NamedTuple):
    """Of a class."""

    name: str
    type: str
    comment: str
    default: str = ""  # "": none


class Method(NamedTuple):
    """Of the contract."""

    proto: MethodDescriptorProto
    comment: str


PAGE = Field("page", "int", "How many come at once; 1..1000.", "100")  # of those that list: the `limit`


def types_of(files: FileDescriptorSet) -> dict[str, Type]:
    """All messages and enums by their full names, which begin with a dot."""

    def types(scope: str, protos: Iterable[Any], path: tuple[int, ...]) -> Iterator[Type]:
        for index, proto in enumerate(protos):  # paths: numbers of fields in descriptor.proto, each with an index
            name, place = scope + proto.name, (*path, index)
            here = {at[len(place) :]: words for at, words in said.items() if at[: len(place)] == place}
            yield (kind := Type(name, proto, here))
            if not kind.is_enum:
                yield from types(f"{name}.", proto.nested_type, (*place, 3))
                yield from types(f"{name}.", proto.enum_type, (*place, 4))

    found: list[Type] = []
    for file in files.file:
        said = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        found += types(f".{file.package}.", file.message_type, (4,))
        found += types(f".{file.package}.", file.enum_type, (5,))
    return {each.name: each for each in found}


class Classes:
    """Writes classes, each once and after those that it refers to."""

    _options = "frozen=True, slots=True"  # of dataclasses
    _by_place = 0  # fields of the largest class that is made by their order, too
    _methods: Mapping[tuple[str, ...], str] = METHODS

    def __init__(self, types: Mapping[str, Type], rules: Rules) -> None:
        self._types = types
        self._rules = rules
        self._of_fields: dict[object, str] = {}
        self.names: dict[str, str] = {}  # of the classes of messages and enums, by the names of these
        self.written: dict[str, str] = {}  # by the names of classes

    def add_told(self, response: str) -> None:
        """The classes of what a method tells."""
        fields = self._types[response].proto.field
        if len(fields) > 1 and all(each.name != "next_page_token" for each in fields):
            self._name(response)
        else:
            for each in fields:
                self._value(each)

    def _name(self, full_name: str) -> str:
        """The name of the class of a message or an enum."""
        if full_name not in self.names:
            kind = self._types[full_name]
            name = full_name.removeprefix(PACKAGE).replace(".", "")
            name = NAMES.get(name, re.sub("Response$", "Result", name))
            if kind.is_enum:
                self._write_enum(name, kind)
            elif kind.is_pair:
                name = f"tuple[{', '.join(map(self._value, kind.proto.field))}]"
            elif kind.only and self._is_map(kind.only):
                name = self._value(kind.only)
            elif kind.only and self._rules(kind.only).ranges:
                value = self._value(kind.only)
                name = f"Sequence[tuple[{value}, {value}]]"
            else:
                name = self._dataclass(name, kind)
            self.names[full_name] = name
        return self.names[full_name]

    def _write_enum(self, name: str, kind: Type) -> None:
        """Without the value that is none, and the prefix that all have."""
        unset, *values = kind.proto.value
        members = []
        for index, value in enumerate(values, 1):
            own = value.name.removeprefix(unset.name.removesuffix("UNSPECIFIED"))
            told = value.number if name in ORDERED else f'"{own.lower()}"'
            members.append(member(f"{own} = {told}", kind.comments.get((2, index), "")))
        self._write(name, f"class {name}(enum.{'IntEnum' if name in ORDERED else 'Enum'}):", kind, members)

    def _dataclass(self, name: str, kind: Type, others: Iterable[str] = ()) -> str:
        """Of all fields but `others`. Its name, which may be another's that is the same."""
        fields = [each for each in self._fields(kind) if each.name not in others]
        same = tuple(each[:2] for each in fields)
        if name.endswith("Result") and same in self._of_fields:
            return self._of_fields[same]
        members = []
        for each in fields:
            default = f" = {each.default}" if each.default else ""
            words = re.sub(r"\b[Uu]nset\b", "None", each.comment) if each.default == "None" else each.comment
            members.append(member(f"{each.name}: {each.type}{default}", words))
        members += [code for needed, code in self._methods.items() if {each.name for each in fields}.issuperset(needed)]
        by_name = "" if len(fields) <= self._by_place else ", kw_only=True"
        self._write(name, f"@dataclass({self._options}{by_name})\nclass {name}:", kind, members)
        return self._of_fields.setdefault(same, name)

    def _write(self, name: str, head: str, kind: Type, members: list[str]) -> None:
        if name in self.written:
            raise ValueError(f"{kind.name} would be a second {name}: give it another name in NAMES")
        self.written[name] = "\n".join([head, docstring(kind.comments.get((), "")), *[""][: len(members)], *members])

    def _fields(self, kind: Type) -> Iterator[Field]:
        """Those of a oneof are one, if their types tell which of them it is."""
        proto = kind.proto
        oneofs: dict[int, list[str]] = {}
        for field in proto.field:
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneofs.setdefault(field.oneof_index, []).append(self._value(field))
        told = {place for place, types in oneofs.items() if len(types) == len({*types})}
        for index, field in enumerate(proto.field):
            place = field.oneof_index if field.HasField("oneof_index") else None
            if place not in told:
                yield self._field(kind, index)
            elif types := oneofs.pop(place, []):  # else told already
                comment = kind.comments.get((8, place), "")
                yield Field(proto.oneof_decl[place].name, " | ".join([*types, "None"]), comment, "None")

    def _field(self, kind: Type, index: int) -> Field:
        field, comment = kind.proto.field[index], kind.comments.get((2, index), "")
        name, value = NAMES.get(field.name, field.name), self._value(field)
        if value == "float" and field.type_name:  # a Duration
            name = NAMES.get(field.name, f"{field.name}_s")
        if self._is_map(field):
            return Field(name, value, comment, "field(default_factory=dict)")
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return Field(name, f"Sequence[{value}]", comment, "()")
        if field.HasField("oneof_index") or (field.type_name and "unset" in comment.lower()):
            return Field(name, f"{value} | None", comment, "None")
        return Field(name, value, comment, EMPTY.get(value, "") if re.search(r"\b([Ee]mpty|0:)", comment) else "")

    def _value(self, field: FieldDescriptorProto) -> str:
        """The type of one value of a field, whose class is written."""
        if not field.type_name:
            return SCALARS.get(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_"), "int")
        if self._is_map(field):
            return f"Mapping[{', '.join(map(self._value, self._types[field.type_name].proto.field))}]"
        if field.type_name.startswith(PACKAGE):
            return self._name(field.type_name)
        return KNOWN.get(field.type_name, "Message")

    def _is_map(self, field: FieldDescriptorProto) -> bool:
        return field.type_name in self._types and self._types[field.type_name].is_map


class Options(Classes):
    """What may be chosen by keyword, flat: fields of a message in another are beside the other's."""

    def add(self, name: str) -> None:
        message, others = OPTIONS[name]
        kind, classes = self._types[PACKAGE + message], {PACKAGE + of: name for name, (of, _) in OPTIONS.items()}
        bases = [classes[each.type_name] for each in kind.proto.field if each.type_name in classes]
        if name in FILLED:
            kind, bases = kind._replace(comments=kind.comments | {(): FILLED[name]}), [*bases, CONTENT]
        fields = [each for each in self._flat(kind, classes) if each.name not in others]
        members = [member(f"{each.name}: {each.type.removesuffix(' | None')} | None", each.comment) for each in fields]
        self._write(name, f"class {name}({', '.join(bases or ['TypedDict'])}, total=False):", kind, members)

    def _flat(self, kind: Type, others: Iterable[str] = ()) -> Iterator[Field]:
        """The fields of a message, with those of each message in it in its place; but not of these others."""
        for index, field in enumerate(kind.proto.field):
            if field.type_name not in others:
                yield from self._flat_field(kind, index)

    def _flat_field(self, kind: Type, index: int) -> Iterator[Field]:
        """A field of a message, or those of the message that it is."""
        field, comment = kind.proto.field[index], kind.comments.get((2, index), "")
        inner = self._types.get(field.type_name)
        if field.type_name in KNOWN:
            yield Field(SECONDS[field.name], "float", comment)
        elif inner is None or inner.is_enum or field.label == FieldDescriptorProto.LABEL_REPEATED:
            yield self._field(kind, index)
        else:
            first, *more = self._flat(inner)
            yield from (first._replace(name=field.name if inner.only else first.name, comment=comment), *more)

    def _value(self, field: FieldDescriptorProto) -> str:
        kind = self._types.get(field.type_name)
        if kind is not None and kind.is_pair and not kind.is_map and kind.name not in (*KNOWN, *self.names):
            return f"dict[str, {' | '.join(dict.fromkeys(map(self._value, kind.proto.field)))}]"
        return super()._value(field)


class Fields(Classes):
    """Classes to extend. Which of those are equal is told there."""

    _options = "frozen=True, slots=True, eq=False"

    def add(self, name: str, message: str, others: Iterable[str]) -> None:
        self._dataclass(name, self._types[PACKAGE + message], others)


class Requests(Classes):
    """What is asked for. Classes of answers are used, not written."""

    _by_place = 2
    _methods: Mapping[tuple[str, ...], str] = {}

    def __init__(self, types: Mapping[str, Type], rules: Rules, answers: Classes) -> None:
        super().__init__(types, rules)
        self.names |= answers.names
        for kind in types.values():
            if kind.only and self._is_map(kind.only):
                self._name(kind.name)  # whichever of the messages of equal fields is asked

    def add(self, name: str, message: str, others: Iterable[str] = ()) -> None:
        self.names[PACKAGE + message] = self._dataclass(name, self._types[PACKAGE + message], others)

    def _field(self, kind: Type, index: int) -> Field:
        field, made = kind.proto.field[index], super()._field(kind, index)
        rules, number = self._rules(field), re.search(r"Unset: (-?\d+(\.\d+)?)", made.comment)
        is_list = field.label == FieldDescriptorProto.LABEL_REPEATED
        if rules.min_items if is_list else (rules.id or rules.name or rules.min_bytes) and made.default != "None":
            return made._replace(default="")
        if number and made.type in ("int | None", "float | None"):
            plain = made.type.removesuffix(" | None")
            return made._replace(type=plain, default=repr({"int": int, "float": float}[plain](number[1])))
        inner = self._types.get(field.type_name)
        empty = "" if inner is None or inner.is_enum or inner.is_pair else f"{made.type}()"
        return made._replace(default=made.default or EMPTY.get(made.type, empty))


class Operations(Options, Requests):
    """What clients do. Classes of answers and of options are used, not written."""

    def __init__(self, types: Mapping[str, Type], rules: Rules, answers: Classes, files: FileDescriptorSet) -> None:
        super().__init__(types, rules, answers)
        self.names |= {PACKAGE + message: name for name, message in LISTED.items()}
        self._methods_of_contract = {each.proto.name: each for each in methods_of(files)}

    def add_class(self, name: str) -> None:
        doc, needed, ask, operations = OPERATIONS[name]
        made = MADE.get(name, {})
        methods = [self._method(rpc, operation, ask, made) for rpc, operation in operations.items()]
        variables = ", ".join(dict.fromkeys(variable for variable, _ in made.values()))
        head = f"class {name}{f'(Generic[{variables}])' if variables else ''}:"
        message, fields = READ.get(name, ("", ()))
        read = [self._property(self._types[PACKAGE + message], field) for field in fields]
        self.written[name] = "\n\n".join([f'{head}\n    """{doc}"""', needed.strip("\n"), *read, *methods])

    def _property(self, kind: Type, name: str) -> str:
        made = next(each for each in self._fields(kind) if each.name == name)
        head = f"    @property\n    def {name}(self) -> {made.type}:"
        return f"{head}\n{docstring(made.comment, 8)}\n        return self.info.{name}"

    def _method(self, rpc: str, operation: Operation, ask: str, made: Mapping[str, tuple[str, str]]) -> str:
        proto, comment = self._methods_of_contract[rpc]
        kind, (name, by_place, options) = self._types[proto.input_type], operation[:3]
        chosen, is_content = self._chosen(options, kind), options == CONTENT
        left = [each for each in kind.proto.field if each.name == by_place or each.name not in (*GIVEN, *chosen)]
        if operation.is_look:
            ask, left = "self._link.ask", [each for each in left if self._rules(each).excludes != "context_id"]
        arguments = [each for field in left for each in self._arguments(kind, field, by_place)]
        arguments.sort(key=lambda each: each.name != by_place)
        flat = {name: [*self._options_of(kind, place)] for name, place in chosen.items()}
        keywords = [each for options_of_field in flat.values() for each in options_of_field]
        arguments += [*keywords, *([PAGE] if operation.is_listing else [])]
        written = [f"{each.name}: {each.type}{default(each)}" for each in arguments]
        written.insert(1 if by_place else 0, "*")
        sent = [each for each in left if not is_content or each.name != by_place]
        fields = [f"{field.name}={self._value_of(field)}" for field in sent]
        options_sent = [f"{each}={self._option(kind.proto.field[place], flat[each])}" for each, place in chosen.items()]
        fields += [*(["**fields"] if is_content else options_sent), *(["limit=page"] if operation.is_listing else [])]
        fields[:0] = ["context_id=self.id"] if operation.is_look else []
        content = ", ".join([by_place, *(each.name for each in keywords)])
        told, answer = self._told(proto.output_type, ask, rpc, fields)
        if (answered := told.removeprefix("list[").removesuffix("]")) in made:
            variable, make = made[answered]
            told = told.replace(answered, variable)
            answer = answer.replace("[each async", f"[self.{make}(each) async")
            answer = re.sub(
                r"return (await .*)", rf"told = \1\n        return self.{make}(told)", answer, flags=re.DOTALL
            )
        if operation.is_listing:  # the items as they come, not a list of them
            told = told.replace("list", "AsyncIterator")
            answer = re.sub(r"items = (.*)\n.*\[each .*", r"return \1", answer)
            answer = re.sub(r"\[(self.* in items)\]", r"(\1)", answer)
        words = [comment, *(f"`{each.name}`: {small(each.comment)}" for each in arguments if tells(each))]
        words += ["Exactly one of text, `tokens` and `messages` is given."] if is_content else []
        return "\n".join(
            [
                wrapped(
                    f"    {'' if operation.is_listing else 'async '}def {name}(",
                    ["self", *written, "timeout_s: float | None = None"],
                    f") -> {told}:",
                ),
                docstring(re.sub(r"\b[A-Z_]+\b", lambda word: ERRORS.get(word[0], word[0]), "\n\n".join(words)), 8),
                *([f"        fields = requests.content({content})"] if is_content else []),
                answer,
            ]
        )

    def _chosen(self, options: str, kind: Type) -> dict[str, int]:
        """The fields of a request that are among these options, or lengths of time: their places by their names."""
        known: set[str] = {each.name for each in kind.proto.field if each.type_name in KNOWN}
        if options:
            message, others = OPTIONS[options]
            known |= {each.name for each in self._types[PACKAGE + message].proto.field}.difference(others)
        return {each.name: place for place, each in enumerate(kind.proto.field) if each.name in known}

    def _options_of(self, kind: Type, place: int) -> Iterator[Field]:
        """The arguments for a field that is chosen."""
        for each in self._flat_field(kind, place):
            words = re.sub(r"\bUnset\b", "None", each.comment).replace("without a duration", "`math.inf`")
            yield Field(each.name, f"{each.type.removesuffix(' | None')} | None", words, "None")

    def _option(self, field: FieldDescriptorProto, flat: Sequence[Field]) -> str:
        """What a request is given for a field that is chosen: a message as the client's function for it makes it, one
        of a single field if there is a value.
        """
        inner, names = self._message(field), ", ".join(each.name for each in flat)
        if inner is None or field.label == FieldDescriptorProto.LABEL_REPEATED:
            return field.name
        if field.type_name in KNOWN:
            return f'requests.duration("{field.name}", {names})'
        if inner.only:
            return f'None if {names} is None else {{"{inner.only.name}": {names}}}'
        return f"requests.{field.name}({names})"

    def _arguments(self, kind: Type, field: FieldDescriptorProto, by_place: str) -> Iterator[Field]:
        """One for a field, or for each field of the message that it is."""
        inner = None if field.label == FieldDescriptorProto.LABEL_REPEATED else self._message(field)
        for index, each in enumerate(inner.proto.field if inner else [field]):
            place = index if inner else [*kind.proto.field].index(field)
            made = self._field(inner or kind, place)
            if made.default == "None":
                made = made._replace(comment=re.sub(r"\bUnset\b", "None", made.comment))
            is_one_of = each.HasField("oneof_index") and not each.proto3_optional
            may_lack = each.name != by_place or is_one_of or made.default == "None" or "Empty:" in made.comment
            yield made if may_lack else made._replace(default="")

    def _message(self, field: FieldDescriptorProto) -> Type | None:
        kind = self._types.get(field.type_name)
        return None if kind is None or kind.is_enum else kind

    def _value_of(self, field: FieldDescriptorProto) -> str:
        """What a request is given for it; of a list of messages their fields, if they have a class, and else what the
        client's function of its name makes of it.
        """
        inner = self._message(field)
        if inner is None:
            return field.name
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            is_listed = field.type_name.removeprefix(PACKAGE) in LISTED.values()
            return f"[asdict(each) for each in {field.name}]" if is_listed else f"requests.{field.name}({field.name})"
        return "{" + ", ".join(f'"{each.name}": {each.name}' for each in inner.proto.field) + "}"

    def _told(self, response: str, ask: str, rpc: str, fields: list[str]) -> tuple[str, str]:
        """The type of what a method returns, and the statement that does it."""
        proto, call = self._types[response].proto, [f'"{rpc}"', "timeout_s"]
        if not proto.field:
            return "None", wrapped("        await self._link.call(", [*call, *fields], ")")
        only, is_paged = proto.field[0], any(each.name == "next_page_token" for each in proto.field)
        is_class = len(proto.field) > 1 and not is_paged
        kind = self._name(response) if is_class else self._value(only)
        if is_class or only.label != FieldDescriptorProto.LABEL_REPEATED:
            return kind, wrapped(f"        return await {ask}(", [*call, kind, *fields], ")")
        if is_paged:
            items = wrapped("        items = self._link.items(", [*call, kind, *fields], ")")
            return f"list[{kind}]", f"{items}\n        return [each async for each in items]"
        values = wrapped("        told = await self._link.call(", [*call, *fields], ")")
        each = f"[decode(each, {kind}) for each in told]" if only.type_name else "list(told)"
        return f"list[{kind}]", f"{values}\n        return {each}"


class EngineCalls(Requests):
    """What engines do, as a protocol. Classes of answers and of requests are used, not written."""

    def __init__(self, types: Mapping[str, Type], rules: Rules, answers: Classes, files: FileDescriptorSet) -> None:
        super().__init__(types, rules, answers)
        by_name = {each.proto.name: each for each in methods_of(files)}
        for name, (doc, calls) in ENGINE_CALLS.items():
            methods = [self._method(by_name[rpc], *call) for rpc, call in calls.items()]
            self.written[name] = "\n\n".join([f'class {name}(Protocol):\n    """{doc}"""', *methods])
            if name in REMOTE_CALLS:
                remote, ask = REMOTE_CALLS[name]
                head = f'class {remote}({name}, Protocol):\n    """{doc.removesuffix(".")}, in another process."""'
                methods = [(by_name[rpc], *call) for rpc, call in calls.items()]
                asked = [self._asked(*each) for each in methods]
                self.written[remote] = "\n\n".join([head, ask.strip("\n"), *asked])

    def _method(self, method: Method, name: str, parts: Iterable[str]) -> str:
        words = re.sub(r"\b[A-Z_]{2,}\b", lambda word: ERRORS.get(word[0], word[0]), method.comment)
        return f"{self._head(method, name, parts)}\n{docstring(words, 8)}"

    def _asked(self, method: Method, name: str, parts: Iterable[str]) -> str:
        """The method of a class that asks another process. No list that comes in parts: that takes several calls."""
        named = {each.name for each in self._types[method.proto.input_type].proto.field}
        request = ["changes" if part == "Changes" else "request" for part in parts if part not in named]
        sent = [f'"{method.proto.name}"', "caller", *request, *(f"{part}={part}" for part in parts if part in named)]
        head, fields = self._head(method, name, parts), self._types[method.proto.output_type].proto.field
        if not fields:
            return "\n".join([head, wrapped("        await self.ask(", sent, ")")])
        told = f"told.{fields[0].name}" if len(fields) == 1 else "told"
        kind, is_list = self._told(method.proto.output_type), fields[0].label == FieldDescriptorProto.LABEL_REPEATED
        if method.proto.server_streaming:
            begun = wrapped("        async with self.begun(", sent, ") as call:")
            body = f"            async for each in call:\n                yield decode(each, {kind})"
            return "\n".join([head.replace("def", "async def", 1), begun, body])
        answer = f"decode({told}, {kind})" if len(fields) > 1 or fields[0].type_name else told
        if len(fields) == 1 and is_list:
            each = kind.removeprefix("Sequence[").removesuffix("]")
            answer = f"[decode(each, {each}) for each in {told}]" if fields[0].type_name else f"list({told})"
        return "\n".join([head, wrapped("        told = await self.ask(", sent, ")"), f"        return {answer}"])

    def _head(self, method: Method, name: str, parts: Iterable[str]) -> str:
        """Arguments at the end may be left out, if nothing, none or no is a value of all of them."""
        kind = self._types[method.proto.input_type]
        places = {each.name: place for place, each in enumerate(kind.proto.field)}
        arguments, optional = list[str](), True
        for part in reversed([*parts]):
            if part not in places:
                arguments.append(f"{'changes' if part == 'Changes' else 'request'}: {part}")
                optional = False
                continue
            made = self._field(kind, places[part])
            value = "False" if made.type == "bool" else made.default
            optional = optional and value in ("None", "()", "False")
            arguments.append(f"{part}: {made.type}{f' = {value}' if optional else ''}")
        arguments = ["self", "caller: Caller", *reversed(arguments)]
        told = self._told(method.proto.output_type)
        if method.proto.server_streaming:
            return wrapped(f"    def {name}(", arguments, f") -> AsyncIterator[{told}]:")
        return wrapped(f"    async def {name}(", arguments, f") -> {told}:")

    def _told(self, response: str) -> str:
        fields = self._types[response].proto.field
        if not fields:
            return "None"
        if len(fields) > 1 and fields[-1].name != "next_page_token":
            return self._name(response)
        is_list = fields[0].label == FieldDescriptorProto.LABEL_REPEATED
        return f"Sequence[{self._value(fields[0])}]" if is_list else self._value(fields[0])

    def table(self) -> str:
        """Of the methods that are behind methods of the contract, and what they take of a request."""
        known = {name: f"requests.{name}" for name in REQUESTS}
        rows = []
        for rpc, (name, parts) in (each for _, calls in ENGINE_CALLS.values() for each in calls.items()):
            taken = [known.get(part, f'"{part}"') for part in parts]
            rows.append(f'    "{rpc}": ("{name}", [{", ".join(taken)}]),')
        kind = "Mapping[str, tuple[str, Sequence[str | type]]]"
        return "\n".join(
            ["# Methods of an engine, and what they take of requests.", f"ENGINE_CALLS: {kind} = {{", *rows, "}"]
        )


def services(files: FileDescriptorSet, table: str) -> str:
    """The module of all services, and of what makes a server serve one."""
    names = sorted(file.name.rpartition("/")[2].removesuffix(".proto") for file in files.file if file.service)
    modules = [module for name in names for module in (f"{name}_pb2", f"{name}_pb2_grpc")]
    stems = {name: name.title().replace("_", "") for name in names}
    return "\n".join(
        [
            '"""The services of the contract.',
            "",
            "Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.",
            '"""',
            "",
            "from collections.abc import Callable, Mapping, Sequence",
            "from typing import Any",
            "",
            "from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor",
            "",
            "from jaxctx.v1 import (",
            *(f"    {module}," for module in sorted([*modules, "requests"])),
            ")",
            "",
            "SERVICES: Mapping[str, ServiceDescriptor] = {",
            *(f'    "{stem}": {name}_pb2.DESCRIPTOR.services_by_name["{stem}"],' for name, stem in stems.items()),
            "}",
            "METHODS: Mapping[str, MethodDescriptor] = {",
            "    method.name: method for service in SERVICES.values() for method in service.methods",
            "}",
            "# What has a server serve a servicer.",
            "SERVE: Mapping[str, Callable[[Any, Any], None]] = {",
            *(f'    "{stem}": {name}_pb2_grpc.add_{stem}Servicer_to_server,' for name, stem in stems.items()),
            "}",
            table,
            "",
        ]
    )


def errors_of(reasons: Type) -> dict[str, str]:
    """A class for each gRPC status that goes with reasons. Where no reason is given it is the first of them.

    What a status with several says is in the list on the enum, which reasons it goes with in the comments on these.
    """
    together = dict(re.findall(r"^ - ([A-Z_]+): (.*(?:\n   .*)*)", reasons.comments[()], re.MULTILINE))
    told: dict[str, dict[str, str]] = {}
    for index, value in enumerate(reasons.proto.value):
        status, _, words = reasons.comments[2, index].strip().partition(": ")
        if status in ERRORS:
            told.setdefault(status, {})[value.name.removeprefix("ERROR_REASON_")] = words
    written = {}
    for status, each in told.items():
        (first, words), *more = each.items()
        if more:
            words = "\n\n".join([together[status], *(f"{reason}: {said}" for reason, said in each.items())])
        name, words = ERRORS[status], words[:1].upper() + words[1:]
        members = ["", f'    code = "{status}"', f'    default_reason = "{first}"']
        code = [f"class {name}(JaxctxError):", docstring(words), *members]
        written[name] = "\n".join([*code, *([ERROR_METHODS[name]] if name in ERROR_METHODS else [])])
    return written


def default(field: Field) -> str:
    return f" = {field.default}" if field.default else ""


def tells(field: Field) -> bool:
    """Whether there is a word on it that its name does not say."""
    return len(field.comment.split()) > 2


def small(comment: str) -> str:
    """A comment that goes on after something."""
    words = " ".join(comment.split())
    return (words[:1].lower() if re.match("[A-Z][a-z]*[ ,:;.]", words) else words[:1]) + words[1:]


def wrapped(head: str, items: list[str], tail: str) -> str:
    """As a formatter does it: on one line, else with the items on a line of their own, else each on one."""
    margin = " " * (len(head) - len(head.lstrip()))
    if len(line := head + ", ".join(items) + tail) <= WIDTH:
        return line
    if len(line := f"{margin}    {', '.join(items)}") <= WIDTH:
        return f"{head}\n{line}\n{margin}{tail}"
    return "\n".join([head, *(f"{margin}    {each}," for each in items), margin + tail])


def docstring(comment: str, depth: int = 4) -> str:
    """Of what stands so deep; if it has several lines, the first sentence is apart."""
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", comment.strip())]
    margin = " " * depth
    if len(paragraphs) == 1 and len(paragraphs[0]) <= WIDTH - len(margin + '""""""'):
        return f'{margin}"""{paragraphs[0]}"""'
    paragraphs[:1] = re.split(r"(?<=\.) (?=[A-Z`])", '"""' + paragraphs[0], maxsplit=1)
    return "\n\n".join(indented(each, depth=depth) for each in paragraphs) + f'\n{margin}"""'


def member(code: str, comment: str) -> str:
    """A line of a class with the comment on it: after it, or where there is no room before it."""
    words = " ".join(comment.split())
    line = f"    {code}  # {small(words).removesuffix('.')}" if words else f"    {code}"
    return line if len(line) <= WIDTH else f"{indented(words, '# ')}\n    {code}"


def indented(words: str, mark: str = "", depth: int = 4) -> str:
    margin = " " * depth + mark
    return textwrap.fill(words, WIDTH - len('"""'), initial_indent=margin, subsequent_indent=margin)


def module(
    doc: str,
    classes: Mapping[str, str],
    names: Mapping[str, str] = {},
    imports: Mapping[str, str] = {},
    first: Iterable[str] = (),
    variable: str = "",
) -> str:
    """A file of classes, with a table of those that have these names in the contract."""
    table = [f'    "{full_name[1:]}": {name.partition("[")[0]},' for full_name, name in names.items()]
    if table:
        table = ["# By the message or enum; a tuple is of its values.", "CLASSES: Mapping[str, type] = {", *table, "}"]
    body = "\n\n\n".join([*([variable] if variable else []), *classes.values(), *(["\n".join(table)] if table else [])])
    lines = {line: sorted({*re.findall(used, body)}) for line, used in {**IMPORTS, **imports}.items()}
    head = [f'"""{doc}', "", "Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.", '"""', ""]
    exports = ["", "__all__ = [", *(f'    "{name}",' for name in sorted(classes)), "]", *([] if variable else [""]), ""]
    return "\n".join(
        [*head, *first, *(imported(line, names) for line, names in lines.items() if names), *exports, body, ""]
    )


def imported(line: str, names: list[str]) -> str:
    """What imports these names; each on a line if all are too many for one."""
    plain = line + ", ".join(names)
    return plain if len(plain.strip()) <= WIDTH else "\n".join([f"{line}(", *(f"    {name}," for name in names), ")"])


def methods_of(files: FileDescriptorSet) -> Iterator[Method]:
    """Those of all services."""
    for file in files.file:
        said = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        for place, service in enumerate(file.service):
            for index, method in enumerate(service.method):
                yield Method(method, said.get((6, place, 2, index), ""))  # numbers of fields in descriptor.proto


def rules_of(files: FileDescriptorSet) -> Rules:
    """The rules of fields, which are an extension that these files define."""
    pool = DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    rule = pool.FindExtensionByName("jaxctx.v1.rule")
    options = GetMessageClass(rule.containing_type)
    return lambda field: options.FromString(field.options.SerializeToString()).Extensions[rule]


def main(descriptors: str, folder: str) -> None:
    files = FileDescriptorSet.FromString(Path(descriptors).read_bytes())
    types, rules = types_of(files), rules_of(files)
    answers, options = Classes(types, rules), Options(types, rules)
    for method in methods_of(files):
        answers.add_told(method.proto.output_type)
    options.names |= answers.names
    requests = Requests(types, rules, answers)
    for name, (message, others) in REQUESTS.items():
        requests.add(name, message, others)
    for name in OPTIONS:
        options.add(name)
    stored = Fields(types, rules)
    for name, (message, others) in STORED.items():
        stored.add(name, message, others)
    listed = Requests(types, rules, answers)
    listed.names |= {PACKAGE + message: name for name, (message, _) in OPTIONS.items()}
    for name, message in LISTED.items():
        listed.add(name, message)
    operations = Operations(types, rules, answers, files)
    for name in OPERATIONS:
        operations.add_class(name)
    own = {each: name for each, name in requests.names.items() if each not in answers.names}
    kinds = "|".join(answers.written)
    known = {"\nfrom jaxctx.v1.answers import ": rf"(?<=[:|] )\b(?:{kinds})\b"}
    lists = "|".join(LISTED) or None
    used = {
        "\nfrom jaxctx.client import ": r"\brequests(?=\.)",
        "from jaxctx.client.link import ": r"(?<=: )Link",
        "from jaxctx.codec import ": r"decode(?=\()",
        "from jaxctx.v1.answers import ": rf"(?:(?<=-> )|(?<=list\[)|(?<=Iterator\[)|(?<=: ))(?:{kinds})\b",
        "from jaxctx.v1.options import ": rf"(?<=: Sequence\[)(?:{lists})\b",
    }
    calls = EngineCalls(types, rules, answers, files)
    of_calls = {
        "from typing import ": r"(?<=[( ])Protocol(?=\))|(?<=: )Any",
        "\nfrom jaxctx.caller import ": r"(?<=: )Caller",
        "from jaxctx.codec import ": r"decode(?=\()",
        "from jaxctx.v1.answers import ": rf"(?:(?<=-> )|(?<=Sequence\[)|(?<=Iterator\[))(?:{kinds})\b",
        "from jaxctx.v1.requests import ": rf"(?<=: )(?:{'|'.join(REQUESTS)})\b",
    }
    raised = {"from jaxctx.status import ": r"JaxctxError|FieldViolation"}
    future = ["from __future__ import annotations", ""]
    made = [variable for kinds_made in MADE.values() for variable, _ in kinds_made.values()]
    variables = "\n".join(f'{name} = TypeVar("{name}")' for name in dict.fromkeys(["T", *made]))
    told = "What is told of contexts, snapshots, models and engines. Moments are in UTC, lengths of time in seconds."
    asked = "What is asked of an engine, and of programs on engines. Lengths of time are in seconds."
    chosen = (
        "What a caller may choose, by keyword.\n\n"
        "Times are in seconds; a `ttl_s` of `math.inf` is for ever, and None, like anything not given, leaves it to\n"
        "the server."
    )
    engine = "What engines do, in process or not."
    kept = "What records of the store say as they are; classes of the store have these fields, and their own."
    done = "What the asyncio client does by one call each."
    failed = "How calls fail: a class for each gRPC status, with the reasons that go with it."
    for name, text in {
        "answers.py": module(told, answers.written, answers.names),
        "requests.py": module(asked, requests.written, own, known),
        "options.py": module(chosen, options.written | listed.written, {}, known),
        "stored.py": module(kept, stored.written),
        "operations.py": module(done, operations.written, {}, used, future, variables),
        "engine_calls.py": module(engine, calls.written, {}, of_calls, future),
        "services.py": services(files, calls.table()),
        "errors.py": module(failed, errors_of(types[PACKAGE + "ErrorReason"]), {}, raised),
    }.items():
        Path(folder, name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
