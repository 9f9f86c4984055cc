"""JSON that may be large: how large it is, without looking at all of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jaxctx_server.http.errors import json_text
from jaxctx_server.http.large_json import SIZE_LIMIT, is_surely_within, json_size, write_json
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5e300, "", "abc", [], {}, [[]] * 50, {"a": [1, None, {"b": "c"}]}, [1] * 1000, {"x" * 50: 1}],
)
def test_a_size_is_never_too_small(value: Any) -> None:
    assert json_size(value) >= len(json_text(value))
    assert json_size(value) <= 20 * len(json_text(value)) + 30


def test_characters_may_be_escaped() -> None:
    value = ["\x00" * 1000]
    assert is_surely_within(value, 10_000)
    assert not is_surely_within(value, len(json_text(value).encode()) - 1)


def test_of_a_large_value_only_a_part_is_looked_at() -> None:
    class Counted(dict[str, Any]):
        looked_at = 0

        def values(self) -> Any:
            Counted.looked_at += 1
            return super().values()

    size = json_size([Counted({"a": "x" * 1000}) for _ in range(100_000)])
    assert size >= SIZE_LIMIT
    assert Counted.looked_at <= SIZE_LIMIT // 1000


@pytest.mark.parametrize(("length", "elsewhere"), [(10, False), (100_000, True)])
async def test_a_large_one_is_written_on_a_thread(backend: Backend, length: int, elsewhere: bool) -> None:
    call, threads = call_of(backend), list[str]()

    def write(value: Any) -> str:
        threads.append(threading.current_thread().name)
        return json_text(value)

    assert await write_json(call, ["x" * length], write) == f'["{"x" * length}"]'
    assert [name.startswith("jaxctx-reading") for name in threads] == [elsewhere]
    budget = backend.pipeline._reader._budget(call.call.budget_owner)
    assert (budget.free_at > 0) == elsewhere, "its caller pays"
