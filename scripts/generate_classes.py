#!/usr/bin/env python3
"""The contract as plain Python: a dataclass for each message that answers, and what callers may choose by keyword.

    scripts/generate_classes.py DESCRIPTOR_SET FOLDER

Writes FOLDER/answers.py and FOLDER/options.py from what `protoc --descriptor_set_out --include_source_info
--include_imports` says of protos/, comments included; `scripts/stubs` runs it. A message answers if a method responds
with it or with what holds it. Of a response with one field, or with a part of a list, only what it holds has a class. A
message of two plain values is a tuple, and responses of the same fields are one class.

A field may be left out if it is repeated, in a oneof or `optional`, or if its comment says what it means that it is
unset, empty or 0: that is its default then, and None is unset. Any option may be left out.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

NAMES = {  # of classes and fields that are not the contract's; else a response is a result: FillResponse, FillResult
    "ApplyChatTemplateResponse": "RenderedChat",
    "CompareResponse": "Comparison",
    "Context": "ContextInfo",  # a Context is the client's
    "ContextChange": "Change",
    "GenerateResponse": "GeneratePiece",
    "WatchContextsResponse": "ContextEvent",
    "duration": "seconds",
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
OPTIONS = {  # by class: the message whose fields they are, and those that a caller gives in another way
    "SamplingOptions": ("Sampling", ()),
    "GenerateOptions": ("GenerateRequest", ("context_id", "n")),
    "NewOptions": ("CreateContextRequest", ()),
    "OpenOptions": ("OpenRequest", ("name", "version")),
    "UpdateOptions": ("UpdateContextRequest", ("context_id",)),
    "SaveOptions": ("SaveRequest", ("context_id", "name")),
    "KeepOptions": ("PublishRequest", ("context_id",)),
}
SECONDS = {"duration": "ttl_s", "pin_for": "pin_s"}  # what durations are called there
PACKAGE = ".jaxctx.v1."
KNOWN = {".google.protobuf.Timestamp": "datetime", ".google.protobuf.Duration": "float"}
SCALARS = {"STRING": "str", "BYTES": "bytes", "BOOL": "bool", "DOUBLE": "float", "FLOAT": "float"}  # the others are int
EMPTY = {"str": '""', "bytes": 'b""', "bool": "False", "float": "0.0", "int": "0"}
IMPORTS = {  # and what shows that they are needed
    "import ": r"\benum(?=\.)",
    "from collections.abc import ": r"Mapping(?=\[)|Sequence(?=\[)",
    "from dataclasses import ": r"dataclass(?=\()|field(?=\()",
    "from datetime import ": r"(?<=: )datetime|(?<=\[)datetime",
    "from typing import ": r"TypedDict",
    "\nfrom google.protobuf.message import ": r"(?<=[:|] )Message\b|(?<=\[)Message\b",
}
WIDTH = 120


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

    def __init__(self, types: Mapping[str, Type]) -> None:
        self._types = types
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
            else:
                name = self._dataclass(name, kind)
            self.names[full_name] = name
        return self.names[full_name]

    def _write_enum(self, name: str, kind: Type) -> None:
        """Without the value that is none, and the prefix that all have."""
        unset, *values = (each.name for each in kind.proto.value)
        names = [each.removeprefix(unset.removesuffix("UNSPECIFIED")) for each in values]
        members = [member(f'{own} = "{own.lower()}"', kind.comments.get((2, i), "")) for i, own in enumerate(names, 1)]
        self._write(name, f"class {name}(enum.Enum):", kind, members)

    def _dataclass(self, name: str, kind: Type) -> str:
        """Its name, which may be another's that is the same."""
        fields = list(self._fields(kind))
        same = tuple(each[:2] for each in fields)
        if name.endswith("Result") and same in self._of_fields:
            return self._of_fields[same]
        members = []
        for each in fields:
            default = f" = {each.default}" if each.default else ""
            words = re.sub(r"\b[Uu]nset\b", "None", each.comment) if each.default == "None" else each.comment
            members.append(member(f"{each.name}: {each.type}{default}", words))
        members += [code for needed, code in METHODS.items() if {each.name for each in fields}.issuperset(needed)]
        head = f"@dataclass(frozen=True, slots=True, kw_only=True)\nclass {name}:"
        self._write(name, head, kind, members)
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
        name, inner = NAMES.get(field.name, field.name), self._types.get(field.type_name)
        if inner and inner.is_map:
            types = ", ".join(map(self._value, inner.proto.field))
            return Field(name, f"Mapping[{types}]", comment, "field(default_factory=dict)")
        value = self._value(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return Field(name, f"Sequence[{value}]", comment, "()")
        if field.HasField("oneof_index") or (field.type_name and "unset" in comment.lower()):
            return Field(name, f"{value} | None", comment, "None")
        return Field(name, value, comment, EMPTY.get(value, "") if re.search(r"\b([Ee]mpty|0:)", comment) else "")

    def _value(self, field: FieldDescriptorProto) -> str:
        """The type of one value of a field, whose class is written."""
        if not field.type_name:
            return SCALARS.get(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_"), "int")
        if field.type_name.startswith(PACKAGE):
            return self._name(field.type_name)
        return KNOWN.get(field.type_name, "Message")


def docstring(comment: str) -> str:
    """A class's; if it has several lines, the first sentence is apart."""
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", comment.strip())]
    if len(paragraphs) == 1 and len(paragraphs[0]) <= WIDTH - len('    """"""'):
        return f'    """{paragraphs[0]}"""'
    paragraphs[:1] = re.split(r"(?<=\.) (?=[A-Z`])", '"""' + paragraphs[0], maxsplit=1)
    return "\n\n".join(map(indented, paragraphs)) + '\n    """'


def member(code: str, comment: str) -> str:
    """A line of a class with the comment on it: after it, or where there is no room before it."""
    words = " ".join(comment.split())
    small = words[:1].lower() if re.match("[A-Z][a-z]*[ ,:;]", words) else words[:1]
    line = f"    {code}  # {small}{words[1:].removesuffix('.')}" if words else f"    {code}"
    return line if len(line) <= WIDTH else f"{indented(words, '# ')}\n    {code}"


def indented(words: str, mark: str = "") -> str:
    return textwrap.fill(words, WIDTH - len('"""'), initial_indent="    " + mark, subsequent_indent="    " + mark)


def module(doc: str, classes: Mapping[str, str], *more: str) -> str:
    """A file of classes."""
    body = "\n\n\n".join([*classes.values(), *more])
    imports = {line: ", ".join(sorted({*re.findall(used, body)})) for line, used in IMPORTS.items()}
    head = [f'"""{doc}', "", "Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.", '"""', ""]
    exports = ["", "__all__ = [", *(f'    "{name}",' for name in sorted(classes)), "]", "", ""]
    return "\n".join([*head, *(line + names for line, names in imports.items() if names), *exports, body, ""])


def main(descriptors: str, folder: str) -> None:
    files = FileDescriptorSet.FromString(Path(descriptors).read_bytes())
    answers, options = Classes(types_of(files)), Classes(types_of(files))
    for method in (method for file in files.file for service in file.service for method in service.method):
        answers.add_told(method.output_type)
    for name in OPTIONS:
        options.add_options(name)
    table = [f'    "{full_name[1:]}": {name.partition("[")[0]},' for full_name, name in answers.names.items()]
    table = ["# By the message or enum; a tuple is of its values.", "CLASSES: Mapping[str, type] = {", *table, "}"]
    told = "What is told of contexts, snapshots, models and engines. Moments are in UTC, lengths of time in seconds."
    chosen = "What a caller may choose. Times are in seconds; None, like anything not given, leaves it to the server."
    Path(folder, "answers.py").write_text(module(told, answers.written, "\n".join(table)), encoding="utf-8")
    Path(folder, "options.py").write_text(module(chosen, options.written), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
