"""Protocol reference: one page for each proto file, made from its descriptors and comments.

protoc writes a descriptor set with source information; every service, method, message, field and enum of it becomes
part of a page, with its comment. Types link to where they are described, so a type without a page fails the build.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import google.api
from google.api import annotations_pb2
from google.api.http_pb2 import HttpRule
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    MethodOptions,
    ServiceDescriptorProto,
)

from jaxctx.v1 import rules_pb2

PACKAGE = "jaxctx.v1"
# Field numbers of descriptor.proto, of which paths in the source information consist.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES, FILE_SYNTAX = 4, 5, 6, 12
MESSAGE_FIELDS, MESSAGE_NESTED, MESSAGE_ENUMS, MESSAGE_ONEOFS = 2, 3, 4, 8
ENUM_VALUES, SERVICE_METHODS = 2, 2

SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "double",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_INT64: "int64",
    FieldDescriptorProto.TYPE_UINT64: "uint64",
    FieldDescriptorProto.TYPE_INT32: "int32",
    FieldDescriptorProto.TYPE_FIXED64: "fixed64",
    FieldDescriptorProto.TYPE_FIXED32: "fixed32",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
    FieldDescriptorProto.TYPE_UINT32: "uint32",
    FieldDescriptorProto.TYPE_SFIXED32: "sfixed32",
    FieldDescriptorProto.TYPE_SFIXED64: "sfixed64",
    FieldDescriptorProto.TYPE_SINT32: "sint32",
    FieldDescriptorProto.TYPE_SINT64: "sint64",
}
SpanPath = tuple[int, ...]


@dataclass
class ProtoFile:
    """One proto file with its comments, by the path of what they belong to.

    `labels` has what comments may link to: types and methods of all files, by name.
    """

    descriptor: FileDescriptorProto
    labels: Mapping[str, str]
    comments: dict[SpanPath, str] = field(default_factory=dict)

    @classmethod
    def read(cls, descriptor: FileDescriptorProto, labels: Mapping[str, str]) -> ProtoFile:
        """Take the comments out of the source information. The comment above `syntax` is the one of the file."""
        comments = {
            tuple(location.path): location.leading_comments
            for location in descriptor.source_code_info.location
            if location.leading_comments
        }
        return cls(descriptor, labels, comments)

    @property
    def page_name(self) -> str:
        """File name of the page, without its ending."""
        return Path(self.descriptor.name).stem

    def comment(self, *path: int) -> str:
        """The comment of what is at this path, as Markdown; empty if it has none."""
        return markdown(self.comments.get(path, ""), self.labels)


def read_files(root: Path) -> list[ProtoFile]:
    """Compile the protos under `root` with protoc and return those of this project, ordered by name."""
    protos = sorted(str(path.relative_to(root / "protos")) for path in (root / "protos" / "jaxctx").rglob("*.proto"))
    google_protos = Path(google.api.__path__[0]).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={root / 'protos'}"]
        command += [f"--proto_path={google_protos}", "--include_imports", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={output}", *protos], check=True)
        descriptors = FileDescriptorSet.FromString(output.read_bytes())
    own = [each for each in descriptors.file if each.package == PACKAGE]
    labels = linkable(own)
    return [ProtoFile.read(each, labels) for each in own]


def linkable(files: Sequence[FileDescriptorProto]) -> dict[str, str]:
    """Labels by name of types and methods whose names are more than one word: others may be words of a sentence."""
    labels: dict[str, str] = {}
    for file in files:
        for service in file.service:
            labels |= {method.name: label(f"{service.name}.{method.name}") for method in service.method}
        labels |= {each.name: label(each.name) for each in (*file.service, *file.message_type, *file.enum_type)}
    return {name: target for name, target in labels.items() if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+", name)}


def write_pages(root: Path, folder: Path) -> None:
    """Write a page for each proto file into `folder`, and an index of them. Files that did not change are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{each.page_name}.md": page(each) for each in read_files(root)}
    pages["index.md"] = index(sorted(pages))
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        target = folder / name
        if not target.exists() or target.read_text("utf-8") != text:
            target.write_text(text, "utf-8")


def index(names: Sequence[str]) -> str:
    """The page that lists all others: services first."""
    services = [name.removesuffix(".md") for name in names if name.endswith("_service.md")]
    others = [name.removesuffix(".md") for name in names if not name.endswith("_service.md")]
    lines = ["# Protocol", "", "Generated from the comments of the proto files when this site is built.", ""]
    lines += ["```{toctree}", ":maxdepth: 2", ":caption: Services", "", *services, "```", ""]
    lines += ["```{toctree}", ":maxdepth: 1", ":caption: Messages", "", *others, "```", ""]
    return "\n".join(lines)


def page(file: ProtoFile) -> str:
    """The page of one proto file."""
    parts = [f"# {file.descriptor.name}", file.comment(FILE_SYNTAX)]
    for number, service in enumerate(file.descriptor.service):
        parts += service_section(file, service, (FILE_SERVICES, number))
    for number, message in enumerate(file.descriptor.message_type):
        parts += message_section(file, message, (FILE_MESSAGES, number), message.name)
    for number, enum in enumerate(file.descriptor.enum_type):
        parts += enum_section(file, enum, (FILE_ENUMS, number), enum.name)
    return "\n\n".join(part for part in parts if part) + "\n"


def service_section(file: ProtoFile, service: ServiceDescriptorProto, path: SpanPath) -> Iterator[str]:
    """A service: its comment, who may call it, and its methods."""
    yield anchor(service.name)
    yield f"## {service.name}"
    yield file.comment(*path)
    if service.options.Extensions[rules_pb2.admin]:
        yield "Its methods need a key of role `admin`."
    if service.options.Extensions[rules_pb2.cluster]:
        yield "Its methods are for the servers of one cluster and need the cluster's key."
    for number, method in enumerate(service.method):
        yield anchor(f"{service.name}.{method.name}")
        yield f"### {method.name}"
        stream = "stream of " if method.server_streaming else ""
        yield f"{type_link(method.input_type)} → {stream}{type_link(method.output_type)}"
        yield file.comment(*path, SERVICE_METHODS, number)
        yield "\n".join(f"- {note}" for note in method_notes(method))


def method_notes(method: MethodDescriptorProto) -> Iterator[str]:
    """What the options of a method say."""
    options = method.options
    if options.Extensions[rules_pb2.work]:
        yield "New work: a server that drains refuses it."
    if options.idempotency_level == MethodOptions.NO_SIDE_EFFECTS:
        yield "Changes nothing; may be called again."
    if options.idempotency_level == MethodOptions.IDEMPOTENT:
        yield "May be called again with the same effect."
    if options.HasExtension(annotations_pb2.http):
        rule = options.Extensions[annotations_pb2.http]
        for each in (rule, *rule.additional_bindings):
            yield f"HTTP: `{route(each)}`"


def route(rule: HttpRule) -> str:
    """A route as "GET /v1/session/{session_id}"."""
    verb = rule.WhichOneof("pattern")
    paths = {"get": rule.get, "put": rule.put, "post": rule.post, "delete": rule.delete, "patch": rule.patch}
    return f"{verb.upper()} {paths[verb]}"


def message_section(file: ProtoFile, message: DescriptorProto, path: SpanPath, name: str) -> Iterator[str]:
    """A message: its comment, a table of its fields, and what is nested in it (map entries apart)."""
    yield anchor(name)
    yield f"## {name}"
    yield file.comment(*path)
    yield field_table(file, message, path)
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from message_section(file, nested, (*path, MESSAGE_NESTED, number), f"{name}.{nested.name}")
    for number, enum in enumerate(message.enum_type):
        yield from enum_section(file, enum, (*path, MESSAGE_ENUMS, number), f"{name}.{enum.name}")


def field_table(file: ProtoFile, message: DescriptorProto, path: SpanPath) -> str:
    """A row for each field: name, type, comment. A message without fields says so."""
    if not message.field:
        return "It has no fields."
    rows = ["| field | type | description |", "|---|---|---|"]
    for number, each in enumerate(message.field):
        comment = file.comment(*path, MESSAGE_FIELDS, number)
        if each.HasField("oneof_index") and not each.proto3_optional:
            oneof = message.oneof_decl[each.oneof_index].name
            about = file.comment(*path, MESSAGE_ONEOFS, each.oneof_index)
            comment = f"{comment} *One of `{oneof}`.* {about}"
        rows.append(f"| `{each.name}` | {field_type(message, each)} | {in_cell(comment)} |")
    return "\n".join(rows)


def field_type(message: DescriptorProto, each: FieldDescriptorProto) -> str:
    """The type of a field, with its label, and with links to messages and enums."""
    entries = {f"{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
    entry = entries.get(each.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map of {field_type(entry, key)} to {field_type(entry, value)}"
    name = SCALARS.get(each.type) or type_link(each.type_name)
    if each.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if each.proto3_optional else name


def enum_section(file: ProtoFile, enum: EnumDescriptorProto, path: SpanPath, name: str) -> Iterator[str]:
    """An enum: its comment, and a table of its values."""
    yield anchor(name)
    yield f"## {name}"
    yield file.comment(*path)
    rows = ["| value | number | description |", "|---|---|---|"]
    for number, value in enumerate(enum.value):
        comment = in_cell(file.comment(*path, ENUM_VALUES, number))
        rows.append(f"| `{value.name}` | {value.number} | {comment} |")
    yield "\n".join(rows)


def anchor(name: str) -> str:
    """What links to this name lead to."""
    return f"({label(name)})="


def label(name: str) -> str:
    """The label of a message, enum, service or method."""
    return "proto-" + name.replace(".", "-").lower()


def type_link(full_name: str) -> str:
    """A link to a type of this project; the plain name of another one's."""
    name = full_name.removeprefix(".")
    if name.startswith(f"{PACKAGE}."):
        own = name.removeprefix(f"{PACKAGE}.")
        return f"[{own}](#{label(own)})"
    return f"`{name}`"


def markdown(comment: str, labels: Mapping[str, str]) -> str:
    """A comment as Markdown: characters that would be markup are escaped, and names of types and methods are links.

    Text between backticks stays as it is.
    """
    lines = [line.removeprefix(" ").rstrip() for line in comment.splitlines()]
    parts = "\n".join(lines).strip().split("`")
    for place in range(0, len(parts), 2):  # every second part is between backticks
        parts[place] = linked(escape(parts[place]), labels)
    return "`".join(parts)


def escape(text: str) -> str:
    """A text in which nothing is markup."""
    for character in "\\*_<>[]|":
        text = text.replace(character, "\\" + character)
    return text


def linked(text: str, labels: Mapping[str, str]) -> str:
    """A text in which names of types and methods are links."""

    def link(found: re.Match[str]) -> str:
        name = found[0]
        return f"[{name}](#{labels[name]})" if name in labels else name

    return re.sub(r"\b[A-Z][A-Za-z]+\b", link, text)


def in_cell(text: str) -> str:
    """A text as the cell of a table, on one line."""
    return " ".join(text.split())
