"""What tests of the metrics share: load to show, and metrics read back, from families or from their text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxctx.types import EngineStats

COUNTED: dict[str, Any] = {field.name: number for number, field in enumerate(fields(EngineStats), 1)}
NUMBERED = EngineStats(**(COUNTED | {"draining": True}))  # every field has a value of its own

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values_of(families: Iterable[Any]) -> Values:
    """The value of each sample by its name and its sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def parsed(body: bytes, *, openmetrics: bool = False) -> list[Any]:
    """The families of a text."""
    return list((parse_openmetrics if openmetrics else parse_text)(body.decode()))


def value(values: Values, name: str, **labels: str) -> float:
    """One sample's value."""
    return values[name, tuple(sorted(labels.items()))]
