"""Where settings come from: flags, then the environment, then the file, then the defaults."""

from __future__ import annotations

import difflib
import sys
import tomllib
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from jaxctx_server.config import Range
from jaxctx_server.start import USAGE, StartError

PREFIX = "JAXCTX_"
NEAR = 0.75  # similarity (difflib) of names that may be meant for each other
C = TypeVar("C")


def read_config(schema: type[C], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> C:
    """Settings of a dataclass like ServeConfig. Raises StartError naming the flag, variable or key that is wrong.

    `--help` and unknown flags end the process, as command lines do.
    """
    kinds = {name: _Kind(hint) for name, hint in get_type_hints(schema, include_extras=True).items()}
    values: dict[str, Any] = {}
    if "config" in kinds:
        given = {PREFIX + name.upper(): name for name in kinds}
        settings = {given[key]: text for key, text in environ.items() if key in given and text}
        _warn_of_mistyped(environ, given.keys(), prog)
        path = _flag(argv, "--config") or settings.get("config")
        if path is not None:
            values = _from_file(Path(path), kinds)
        values |= {name: kinds[name].parsed(text, PREFIX + name.upper()) for name, text in settings.items()}
    default = schema(**values) if "config" in kinds else tyro.MISSING_NONPROP
    config: C = tyro.cli(schema, prog=prog, args=list(argv), default=default)
    for name, kind in kinds.items():
        kind.check(flag_of(name), getattr(config, name))
    return config


def _warn_of_mistyped(environ: Mapping[str, str], variables: Collection[str], prog: str) -> None:
    """A line for each variable that is nearly one of ours. Others with the prefix may be another program's."""
    names = [variable.removeprefix(PREFIX) for variable in variables]
    for key in environ:
        if key.startswith(PREFIX) and key not in variables:
            for near in difflib.get_close_matches(key.removeprefix(PREFIX).upper(), names, 1, NEAR):
                print(f"{prog}: {key}: there is no such setting; did you mean {PREFIX}{near}?", file=sys.stderr)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _flag(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before the command line is parsed."""
    found = None
    for place, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
        elif word == flag and place + 1 < len(argv):
            found = argv[place + 1]
    return found


def _from_file(path: Path, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StartError(f"--config: {path}: {error.strerror}", USAGE) from error
    except ValueError as error:
        raise StartError(f"--config: {path}: {error}", USAGE) from error
    values = {}
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in kinds or name == "config":
            near = difflib.get_close_matches(name, kinds.keys() - {"config"}, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartError(f"--config: {path}: {key}: there is no such setting{hint}", USAGE)
        values[name] = kinds[name].converted(value, f"--config: {path}: {key}")
    return values


class _Kind:
    """The type of a field: a plain type, a choice of strings, or one of these or None; and perhaps a range."""

    def __init__(self, hint: Any) -> None:
        self._range: Range | None = None
        while get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            self._range = next((note for note in notes if isinstance(note, Range)), self._range)
        self._optional = get_origin(hint) is types.UnionType and type(None) in get_args(hint)
        if self._optional:
            (hint,) = (each for each in get_args(hint) if each is not type(None))
        self._choices = get_args(hint) if get_origin(hint) is Literal else ()
        self._type: type = str if self._choices else hint

    def parsed(self, text: str, where: str) -> Any:
        """The value of an environment variable."""
        if self._type in (int, float):
            try:
                return self.converted(None if text == "None" else self._type(text), where)
            except ValueError:
                raise StartError(f"{where}: must be {self._expected()}, not {text!r}", USAGE) from None
        return self.converted(text, where)

    def converted(self, value: Any, where: str) -> Any:
        """The value of a key of the file."""
        if self._optional and value in (None, "None"):
            return None
        if self._type is Path and isinstance(value, str):
            value = Path(value)
        if self._type is float and type(value) is int:
            value = float(value)
        if type(value) is not self._type and not (self._type is Path and isinstance(value, Path)):
            raise StartError(f"{where}: must be {self._expected()}, not {value!r}", USAGE)
        self.check(where, value)
        return value

    def check(self, where: str, value: Any) -> None:
        """Raise StartError unless the value is in range."""
        in_range = self._range is None or value is None or value in self._range
        if not in_range or (self._choices and value not in self._choices):
            raise StartError(f"{where}: must be {self._expected()}, not {value}", USAGE)

    def _expected(self) -> str:
        if self._choices:
            return f"one of {', '.join(self._choices)}"
        noun = {int: "a whole number", float: "a number", bool: "true or false"}.get(self._type, "text")
        return f"{noun} {self._range}" if self._range else noun
