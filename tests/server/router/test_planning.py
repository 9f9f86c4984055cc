"""What a router asks of engines before a first fill, and how it chooses among their answers."""

from types import SimpleNamespace
from typing import Any

from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.router.planning import plan_of_first_fill, plan_order


def engine(load: float, draining: bool = False) -> Any:
    return SimpleNamespace(load=load, draining=draining)


def plan(resident: int = 0, restored: int = 0, pages_needed: int = 1, pages_available: int = 9) -> pb.PlanResponse:
    return pb.PlanResponse(
        resident=resident, restored=restored, pages_needed=pages_needed, pages_available=pages_available
    )


def test_most_cached_then_least_loaded_and_those_that_lack_pages_or_drain_last() -> None:
    best = (engine(5.0), plan(resident=3, restored=3))
    second = (engine(0.1), plan(resident=5))
    third = (engine(0.2), plan(resident=5))
    full = (engine(0.0), plan(resident=9, pages_needed=10))
    draining = (engine(0.0, draining=True), plan(resident=9))
    assert sorted([draining, full, third, second, best], key=plan_order) == [best, second, third, full, draining]


def test_a_plan_asks_about_the_content_of_the_fill() -> None:
    created = pb.CreateContextRequest(context_id="a", model_id="m", salt="s", priority=5)
    for content in (
        {"text": "hello", "add_special_tokens": False},
        {"tokens": {"ids": [1, 2]}},
        {"messages": {"messages": [{"role": "user", "content": "hello"}]}},
    ):
        fill = pb.FillRequest(context_id="a", defer=True, **content)  # type: ignore[arg-type]
        expected = pb.PlanRequest(model_id="m", salt="s", **content)  # type: ignore[arg-type]
        assert plan_of_first_fill(created, fill) == expected
