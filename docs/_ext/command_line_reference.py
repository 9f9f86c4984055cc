"""Configuration reference: the settings of `jaxctx-serve`, read from the source of its configuration module.

Each dataclass is a command, each of its fields a setting, and the text below a field describes it. The module is parsed
and not imported, so that the site can be built without what the server needs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COMMAND = "jaxctx-serve"
DEFAULT_COMMAND = "ServeConfig"  # the class of `jaxctx-serve` without a subcommand
NOT_SETTINGS = {"_"}  # marks where settings by keyword begin

INTRODUCTION = """# Configuration

Generated from `server/jaxctx_server/config.py` when this site is built.

Every setting of a server can be given in three ways. A flag goes before the environment, the environment before the
file, and the file before the default:

| way | example |
|---|---|
| flag | `--page-size 32` |
| environment | `JAXCTX_PAGE_SIZE=32` |
| TOML file, named by `--config` | `page_size = 32` |

A setting that is a yes or no is switched off by `--no-NAME`. The variable of a flag is its name in capital letters,
with `JAXCTX_` before it and `_` in place of `-`.
"""


Constants = Mapping[str, ast.expr]  # what the module assigns, by name


@dataclass(frozen=True)
class Setting:
    """One setting: a field of a dataclass of the configuration module."""

    name: str
    type: str
    default: str | None  # None: it must be given
    description: str
    is_positional: bool


@dataclass(frozen=True)
class Command:
    """One dataclass of the configuration module."""

    class_name: str
    description: str
    settings: list[Setting]
    has_server_settings: bool  # it inherits those of the server


def write_page(source: Path, target: Path) -> None:
    """Write the page. Raises ValueError if the module declares no settings, or one without a description."""
    text = page(read_commands(source.read_text("utf-8")))
    if not target.exists() or target.read_text("utf-8") != text:
        target.write_text(text, "utf-8")


def read_commands(source: str) -> list[Command]:
    """The commands that a module declares: its dataclasses."""
    module = ast.parse(source)
    constants = {name: value for node in module.body for name, value in assigned(node)}
    commands = [read_command(node, constants) for node in module.body if is_dataclass(node)]
    if not any(command.settings for command in commands):
        raise ValueError("the configuration module declares no settings")
    return commands


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """What a statement assigns to a plain name: a constant, or another name for a type."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value


def is_dataclass(node: ast.stmt) -> bool:
    """Whether a statement is a dataclass with a docstring."""
    if not isinstance(node, ast.ClassDef) or ast.get_docstring(node) is None:
        return False
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def read_command(node: ast.stmt, constants: Constants) -> Command:
    """The settings of one dataclass, without those that it inherits."""
    assert isinstance(node, ast.ClassDef)
    settings: list[Setting] = []
    is_positional = True
    for place, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name in NOT_SETTINGS:
            is_positional = False
            continue
        description = docstring_after(node.body, place)
        if not description:
            raise ValueError(f"{node.name}.{name} has no description")
        default = None if statement.value is None else default_text(statement.value)
        settings.append(Setting(name, type_text(statement.annotation, constants), default, description, is_positional))
    keyword_only = any("kw_only=True" in ast.unparse(each) for each in node.decorator_list)
    if keyword_only or is_positional:  # without a mark all of them are flags
        settings = [Setting(s.name, s.type, s.default, s.description, False) for s in settings]
    has_server_settings = any(ast.unparse(base) == DEFAULT_COMMAND for base in node.bases)
    return Command(node.name, ast.get_docstring(node) or "", settings, has_server_settings)


def docstring_after(body: list[ast.stmt], place: int) -> str:
    """The docstring below a field, on one line; empty if it has none."""
    if place + 1 == len(body):
        return ""
    following = body[place + 1]
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return " ".join(str(following.value.value).split())
    return ""


def type_text(annotation: ast.expr, constants: Constants) -> str:
    """A type as a user says it, with the range of a number."""
    if isinstance(annotation, ast.BinOp):  # X | None
        parts = [type_text(each, constants) for each in (annotation.left, annotation.right)]
        return " or ".join(part for part in parts if part != "None")
    if isinstance(annotation, ast.Subscript):
        kind = ast.unparse(annotation.value)
        arguments = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if kind == "Annotated":
            ranges = [range_text(each, constants) for each in arguments[1:]]
            return " ".join([type_text(arguments[0], constants), *ranges]).strip()
        if kind == "Literal":
            return ", ".join(f"`{each.value!s}`" for each in arguments if isinstance(each, ast.Constant))
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "yes or no", "Path": "path"}
    names["tuple[str, ...]"] = "words"
    name = ast.unparse(annotation)
    if name in constants:
        return type_text(constants[name], constants)
    return names.get(name, name)


def range_text(constraint: ast.expr, constants: Constants) -> str:
    """The range that `within(low, high)` states."""
    if isinstance(constraint, ast.Call) and ast.unparse(constraint.func) == "within":
        low, high = (number_text(each, constants) for each in constraint.args)
        return f"from {low} to {high}"
    return ""


def number_text(number: ast.expr, constants: Constants) -> str:
    """A number as it is written; powers of two as such, named ones by their value."""
    name = ast.unparse(number)
    if name in constants:
        return number_text(constants[name], constants)
    if isinstance(number, ast.Constant) and isinstance(number.value, int):
        return f"{number.value:,}"
    return name.replace(" ** ", "^")


def default_text(value: ast.expr) -> str:
    """A default as a user would write it."""
    if isinstance(value, ast.Tuple) and not value.elts:
        return "none"
    if not isinstance(value, ast.Constant):
        return "see the description" if isinstance(value, ast.Call) else f"`{ast.unparse(value)}`"
    if value.value is None:
        return "none"
    if isinstance(value.value, bool):
        return "yes" if value.value else "no"
    return f"`{value.value!s}`"


def page(commands: list[Command]) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(line for command in commands for line in section(command))]) + "\n"


def section(command: Command) -> Iterator[str]:
    """A command: what it does, and a table of its settings."""
    yield f"## {title(command)}"
    yield ""
    yield escape(command.description)
    yield ""
    if not command.settings:
        yield "Its settings are those of a server." if command.has_server_settings else "It has no settings."
        yield ""
        return
    yield "| setting | value | default | meaning |"
    yield "|---|---|---|---|"
    for setting in command.settings:
        flag = setting.name.upper() if setting.is_positional else "--" + setting.name.replace("_", "-")
        default = "must be given" if setting.default is None else setting.default
        yield f"| `{flag}` | {escape(setting.type)} | {default} | {escape(setting.description)} |"
    yield ""


def title(command: Command) -> str:
    """The command of a class: PlanConfig is `jaxctx-serve plan`."""
    if command.class_name == DEFAULT_COMMAND:
        return COMMAND
    return f"{COMMAND} {command.class_name.removesuffix('Config').lower()}"


def escape(text: str) -> str:
    """Plain text as Markdown; text between backticks stays as it is."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):  # every second part is between backticks
        for character in "\\*_<>[]|-":
            parts[place] = parts[place].replace(character, "\\" + character)
    return "`".join(parts)
