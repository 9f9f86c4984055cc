"""Symbols of a grammar in the Lark dialect of llguidance, and how they are put together."""

import json
from collections.abc import Sequence

from jaxctx.model.text.json_schemas import STYLE, Schema

ANY_TEXT = r"/(.|\n)*/"


def json_symbol(schema: Schema) -> str:
    """JSON of a schema. Its own options for white space are kept."""
    return "%json " + json.dumps({"x-guidance": STYLE, **schema}, ensure_ascii=False)


def alternatives(name: str, places: Sequence[int]) -> str:
    """One of the rules of this name."""
    return " | ".join(f"{name}_{place}" for place in places)


def sequence(*symbols: str) -> str:
    """Symbols one behind the other, without those that are empty."""
    return " ".join(symbol for symbol in symbols if symbol)


def quoted(text: str) -> str:
    """A text as a symbol; empty for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
