#!/usr/bin/env python3
"""The contract as plain Python: dataclasses of what is asked and answered, what callers may choose by keyword, and the
operations of a client that are one call each. And the fields of the store's records.

    scripts/generate_classes.py DESCRIPTOR_SET FOLDER

Writes answers.py, requests.py, options.py, operations.py and stored.py into FOLDER, from what `protoc
--descriptor_set_out --include_source_info --include_imports` says of protos/, comments included; `scripts/stubs` runs
it. A message answers if a method responds with it or with what holds it. Of a response with one field, or with a part
of a list, only what it holds has a class. A message of two plain values is a tuple, one of a map or of ranges is what
it holds, and responses of the same fields are one class.

A field of an answer may be left out if it is repeated, in a oneof or `optional`, or if its comment says what it means
that it is unset, empty or 0: that is its default then, and None is unset. One of a request must be there only if its
rules let it not be empty; if its comment says which number is meant where it is unset, that is its default. Any option
may be left out. An argument of an operation that is given by place must be there unless its comment says what it means
that it is empty.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
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
OPTIONS = {  # by class: the message whose fields they are, and those that a caller gives in another way
    "SamplingOptions": ("Sampling", ()),
    "GenerateOptions": ("GenerateRequest", ("context_id", "n")),
    "NewOptions": ("CreateContextRequest", ()),
    "OpenOptions": ("OpenRequest", ("name", "version")),
    "UpdateOptions": ("UpdateContextRequest", ("context_id",)),
    "SaveOptions": ("SaveRequest", ("context_id", "name")),
    "KeepOptions": ("PublishRequest", ("context_id",)),
}
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
    options: str = ""  # the class in OPTIONS of fields that are chosen by keyword
    is_listing: bool = False  # whether a list that comes in parts is iterated over; else it is there at once


OPERATIONS = {  # by class: what it says of itself, what its methods need, how they ask, and they by those they call
    "ContextCalls": (
        """Operations on a context that are one call each.""",
        '''
    async def _change(self, method: str, timeout_s: float | None, kind: type[T], /, **fields: Any) -> T:
        """Call a method that writes to this context; what comes, as an answer of this class."""
        raise NotImplementedError''',
        "self._change",
        {
            "Flush": Operation("flush"),
            "Truncate": Operation("truncate", "tokens"),
            "Rewind": Operation("rewind", "to"),
            "ReservePages": Operation("reserve", "pages"),
            "CommitPages": Operation("commit", "pages"),
            "ReleasePages": Operation("release", "pages"),
            "UpdateContext": Operation("update", options="UpdateOptions"),
            "Save": Operation("save", "name", "SaveOptions"),
            "Publish": Operation("publish", options="KeepOptions"),
        },
    ),
    "ServerCalls": (
        """Operations on a server that are one call each.""",
        "    _link: Link",
        "self._link.ask",
        {
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
        },
    ),
}
GIVEN = ("context_id", "limit", "page_token")  # fields of requests that are no arguments of these
ERRORS = {each.name: each.name.title().replace("_", "") for each in grpc.StatusCode}  # as the client calls them
LISTED = {"Output": "PassOutput"}  # options that come in lists: by dataclass the message, in which messages are options
SECONDS = {"duration": "ttl_s", "pin_for": "pin_s"}  # what durations are called there
ORDERED = ("Criterion",)  # enums whose members can be compared, by the contract's numbers
PACKAGE = ".jaxctx.v1."
KNOWN = {".google.protobuf.Timestamp": "datetime", ".google.protobuf.Duration": "float"}
SCALARS = {"STRING": "str", "BYTES": "bytes", "BOOL": "bool", "DOUBLE": "float", "FLOAT": "float"}  # the others are int
EMPTY = {"str": '""', "bytes": 'b""', "bool": "False", "float": "0.0", "int": "0"}
IMPORTS = {  # and what shows that they are needed
    "import ": r"\benum(?=\.)",
    "from collections.abc import ": r"(?:AsyncIterator|Mapping|Sequence)(?=\[)",
    "from dataclasses import ": r"dataclass(?=\()|field(?=\()",
    "from datetime import ": r"(?<=: )datetime|(?<=\[)datetime",
    "from typing import ": r"(?<=: )Any\b|TypedDict|TypeVar|Unpack",
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

    def add_options(self, name: str) -> None:
        message, others = OPTIONS[name]
        kind, classes = self._types[PACKAGE + message], {PACKAGE + of: name for name, (of, _) in OPTIONS.items()}
        bases = [classes[each.type_name] for each in kind.proto.field if each.type_name in classes]
        fields = [each for each in self._flat(kind, classes) if each.name not in others]
        members = [member(f"{each.name}: {each.type.removesuffix(' | None')} | None", each.comment) for each in fields]
        self._write(name, f"class {name}({', '.join(bases or ['TypedDict'])}, total=False):", kind, members)

    def _flat(self, kind: Type, others: Iterable[str] = ()) -> Iterator[Field]:
        """The fields of a message, with those of each message in it in its place; but not of these others."""
        for index, field in enumerate(kind.proto.field):
            inner, comment = self._types.get(field.type_name), kind.comments.get((2, index), "")
            if field.type_name in KNOWN:
                yield Field(SECONDS[field.name], "float", comment)
            elif inner is None or inner.is_enum or inner.is_map:
                yield self._field(kind, index)
            elif inner.name not in others:
                first, *more = self._flat(inner)
                yield from (first._replace(comment=comment), *more)

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


class Operations(Requests):
    """What clients do. Classes of answers and of options are used, not written."""

    def __init__(self, types: Mapping[str, Type], rules: Rules, answers: Classes, files: FileDescriptorSet) -> None:
        super().__init__(types, rules, answers)
        self._methods_of_contract = {each.proto.name: each for each in methods_of(files)}

    def add_class(self, name: str) -> None:
        doc, needed, ask, operations = OPERATIONS[name]
        methods = [self._method(rpc, operation, ask) for rpc, operation in operations.items()]
        head = f"class {name}:"
        self.written[name] = "\n\n".join([f'{head}\n    """{doc}"""', needed.strip("\n"), *methods])

    def _method(self, rpc: str, operation: Operation, ask: str) -> str:
        proto, comment = self._methods_of_contract[rpc]
        kind, (name, by_place, options) = self._types[proto.input_type], operation[:3]
        chosen = self._chosen(options)
        left = [each for each in kind.proto.field if each.name not in (*GIVEN, *chosen)]
        arguments = [each for field in left for each in self._arguments(kind, field, by_place)]
        arguments.sort(key=lambda each: each.name != by_place)
        arguments += [PAGE] if operation.is_listing else []
        written = [f"{each.name}: {each.type}{default(each)}" for each in arguments]
        written.insert(1 if by_place else 0, "*")
        keywords = [f"**options: Unpack[{options}]"] if options else []
        fields = [f"{field.name}={self._value_of(field)}" for field in left]
        is_update = any(each.name == "labels" and not self._is_map(each) for each in kind.proto.field)
        settings = f"requests.settings(options, {options}{', update=True' if is_update else ''})"
        fields += [*(["**fields"] if options else []), *(["limit=page"] if operation.is_listing else [])]
        told, answer = self._told(proto.output_type, ask, rpc, fields)
        if operation.is_listing:  # the items as they are, not a list of them
            told = told.replace("list", "AsyncIterator")
            answer = re.sub(r"items = (.*)\n.*", r"return \1", answer)
        words = [comment, *(f"`{each.name}`: {small(each.comment)}" for each in arguments if tells(each))]
        return "\n".join(
            [
                "    @listing" if operation.is_listing else "    @operation",
                wrapped(
                    f"    {'' if operation.is_listing else 'async '}def {name}(",
                    ["self", *written, "timeout_s: float | None = None", *keywords],
                    f") -> {told}:",
                ),
                docstring(re.sub(r"\b[A-Z_]+\b", lambda word: ERRORS.get(word[0], word[0]), "\n\n".join(words)), 8),
                *([f"        fields = {settings}"] if options else []),
                answer,
            ]
        )

    def _chosen(self, options: str) -> list[str]:
        """The names of the contract's fields that these options are."""
        if not options:
            return []
        message, others = OPTIONS[options]
        return [each.name for each in self._types[PACKAGE + message].proto.field if each.name not in others]

    def _arguments(self, kind: Type, field: FieldDescriptorProto, by_place: str) -> Iterator[Field]:
        """One for a field, or for each field of the message that it is."""
        inner = self._types.get(field.type_name)
        for index, each in enumerate(inner.proto.field if inner else [field]):
            place = index if inner else [*kind.proto.field].index(field)
            made = self._field(inner or kind, place)
            if made.default == "None":
                made = made._replace(comment=re.sub(r"\bUnset\b", "None", made.comment))
            yield made if each.name != by_place or "Empty:" in made.comment else made._replace(default="")

    def _value(self, field: FieldDescriptorProto) -> str:
        kind = self._types.get(field.type_name)
        if kind is not None and kind.is_pair and kind.name not in self.names:
            return f"dict[str, {' | '.join(dict.fromkeys(map(self._value, kind.proto.field)))}]"
        return super()._value(field)

    def _value_of(self, field: FieldDescriptorProto) -> str:
        """What a request is given for it."""
        inner = self._types.get(field.type_name)
        if inner is None:
            return field.name
        return "{" + ", ".join(f'"{each.name}": {each.name}' for each in inner.proto.field) + "}"

    def _told(self, response: str, ask: str, rpc: str, fields: list[str]) -> tuple[str, str]:
        """The type of what a method returns, and the statement that does it."""
        proto, call = self._types[response].proto, [f'"{rpc}"', "timeout_s"]
        if not proto.field:
            return "None", wrapped("        await self._link.call(", [*call, *fields], ")")
        only, is_list = proto.field[0], proto.field[0].label == FieldDescriptorProto.LABEL_REPEATED
        kind = self._name(response) if len(proto.field) > 1 and not is_list else self._value(only)
        if not is_list:
            return kind, wrapped(f"        return await {ask}(", [*call, kind, *fields], ")")
        if len(proto.field) > 1:
            items = wrapped("        items = self._link.items(", [*call, kind, *fields], ")")
            return f"list[{kind}]", f"{items}\n        return [each async for each in items]"
        values = wrapped("        told = await self._link.call(", [*call, *fields], ")")
        each = f"[decode(each, {kind}) for each in told]" if only.type_name else "list(told)"
        return f"list[{kind}]", f"{values}\n        return {each}"


def default(field: Field) -> str:
    return f" = {field.default}" if field.default else ""


def tells(field: Field) -> bool:
    """Whether there is a word on it that its name does not say."""
    return len(field.comment.split()) > 2


def small(comment: str) -> str:
    """A comment that goes on after something."""
    words = " ".join(comment.split())
    return (words[:1].lower() if re.match("[A-Z][a-z]*[ ,:;]", words) else words[:1]) + words[1:]


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
    lines = {line: ", ".join(sorted({*re.findall(used, body)})) for line, used in {**IMPORTS, **imports}.items()}
    head = [f'"""{doc}', "", "Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.", '"""', ""]
    exports = ["", "__all__ = [", *(f'    "{name}",' for name in sorted(classes)), "]", *([] if variable else [""]), ""]
    return "\n".join([*head, *first, *(line + names for line, names in lines.items() if names), *exports, body, ""])


class Method(NamedTuple):
    """Of the contract."""

    proto: MethodDescriptorProto
    comment: str


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
    answers, options = Classes(types, rules), Classes(types, rules)
    for method in methods_of(files):
        answers.add_told(method.proto.output_type)
    requests = Requests(types, rules, answers)
    for name, (message, others) in REQUESTS.items():
        requests.add(name, message, others)
    for name in OPTIONS:
        options.add_options(name)
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
    known = {"\nfrom jaxctx.v1.answers import ": rf"(?<=[:|] )\b(?:{'|'.join(answers.written)})\b"}
    used = {
        "\nfrom jaxctx.client import ": r"\brequests(?=\.)",
        "from jaxctx.client.drive import ": r"(?<=@)(?:listing|operation)",
        "from jaxctx.client.link import ": r"(?<=: )Link",
        "from jaxctx.codec import ": r"decode(?=\()",
        "from jaxctx.v1.answers import ": rf"(?:(?<=-> )|(?<=list\[)|(?<=Iterator\[))(?:{'|'.join(answers.written)})\b",
        "from jaxctx.v1.options import ": r"(?<=Unpack\[)\w+",
    }
    future, variable = ["from __future__ import annotations", ""], 'T = TypeVar("T")'
    told = "What is told of contexts, snapshots, models and engines. Moments are in UTC, lengths of time in seconds."
    asked = "What is asked of an engine, and of programs on engines. Lengths of time are in seconds."
    chosen = "What a caller may choose. Times are in seconds; None, like anything not given, leaves it to the server."
    kept = "What records of the store say as they are; classes of the store have these fields, and their own."
    done = "What clients do by one call each, as programs for either client."
    for name, text in {
        "answers.py": module(told, answers.written, answers.names),
        "requests.py": module(asked, requests.written, own, known),
        "options.py": module(chosen, options.written | listed.written),
        "stored.py": module(kept, stored.written),
        "operations.py": module(done, operations.written, {}, used, future, variable),
    }.items():
        Path(folder, name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
