"""docs/metrics.md has the metrics of the table, and no others. What is exposed: test_server_metrics.py."""

from __future__ import annotations

import re
from pathlib import Path

from jaxctx_server.metrics.table import METRICS, Kind

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"\| `((?:jaxctx_|vllm:)[a-z0-9_]+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|")


def test_the_documented_metrics_are_those_of_the_table() -> None:
    rows = ROW.findall(DOCS.read_text("utf-8"))
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    assert len(documented) == len(rows)
    assert documented == {metric.name: (metric.kind.value, metric.labels, metric.help) for metric in METRICS.values()}


def test_names_follow_prometheus() -> None:
    for metric in METRICS.values():
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith("_seconds")


def test_no_label_is_of_an_open_set() -> None:
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert labels == {
        *("version", "role", "model_name", "dtype", "kv_dtype", "platform", "state", "method", "transport", "code"),
        *(
            "weights_dtype",
            "reason",
            "finish_reason",
            "finished_reason",
            "engine_id",
            "tier",
            "implementation",
            "block_size",
            "num_gpu_blocks",
        ),
    }
