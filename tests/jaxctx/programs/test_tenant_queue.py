"""The queue of a tenant: order, units, models and turns, also while tasks are taken."""

import random

import pytest

from jaxctx.programs.tasks import Task, TaskGroup
from jaxctx.programs.tenant_queue import TenantQueue
from tests.jaxctx.programs.builders import make_call


def make_tasks(count: int, model_id: str = "m") -> list[Task]:
    return [make_call(["a"], model_id=model_id).tasks[0] for _ in range(count)]


@pytest.fixture
def queue() -> TenantQueue:
    return TenantQueue(0)


def in_order(queue: TenantQueue, model_id: str = "m") -> list[Task]:
    """All tasks of a model, each taken when it is the first."""
    taken = []
    while (first := queue.first(model_id)) is not None:
        queue.take(first)
        taken.append(first)
    queue.end_dispatch()
    return taken


def test_lower_numbers_go_first_and_of_equal_ones_what_came_first(queue: TenantQueue) -> None:
    tasks = make_tasks(5)
    for task, number in zip(tasks, (2, 1, 2, 1, 3), strict=True):
        queue.add(task, number, None)
    assert len(queue) == 5
    assert in_order(queue) == [tasks[1], tasks[3], tasks[0], tasks[2], tasks[4]]
    assert len(queue) == 0
    assert list(queue.models) == []


def test_a_task_that_waits_keeps_its_place(queue: TenantQueue) -> None:
    first, second = make_tasks(2)
    for task in (first, second, first):
        queue.add(task, 0, None)
    assert in_order(queue) == [first, second]


def test_what_was_discarded_is_gone_and_unknown_tasks_are_none(queue: TenantQueue) -> None:
    first, second, unknown = make_tasks(3)
    for task in (first, second):
        queue.add(task, 0, ("p", "m"))
    queue.discard(unknown)
    queue.set_unit(unknown, ("p", "m"))
    queue.discard(first)
    queue.discard(first)
    assert queue.unit(second, 9) == [second]
    assert queue.turn(second) == 0
    assert in_order(queue) == [second]


def test_units_are_in_order_up_to_a_limit(queue: TenantQueue) -> None:
    tasks = make_tasks(6)
    group = TaskGroup()
    units = [("p", "m"), (group, "m"), None, ("p", "m"), (group, "m"), ("p", "m")]
    for number, (task, unit) in enumerate(zip(tasks, units, strict=True)):
        queue.add(task, number, unit)
    assert queue.unit(tasks[0], 9) == [tasks[0], tasks[3], tasks[5]]
    assert queue.unit(tasks[0], 2) == [tasks[0], tasks[3]]
    assert queue.unit(tasks[1], 9) == [tasks[1], tasks[4]]
    assert queue.unit(tasks[2], 9) == [tasks[2]]
    assert queue.unit(tasks[2], 0) == []
    queue.set_unit(tasks[3], (group, "m"))
    queue.set_unit(tasks[2], (group, "m"))
    queue.set_unit(tasks[5], None)
    assert queue.unit(tasks[0], 9) == [tasks[0]]
    assert queue.unit(tasks[1], 9) == tasks[1:5]
    assert queue.unit(tasks[5], 9) == [tasks[5]]


def test_turns_count_over_all_models_and_stay_until_the_dispatch_ends(queue: TenantQueue) -> None:
    queue.turns_taken = 10
    tasks = [make_tasks(1, model_id)[0] for model_id in ("m", "n", "m", "n")]
    for number, task in enumerate(tasks):
        queue.add(task, number, None)
    assert [queue.turn(task) for task in tasks] == [10, 11, 12, 13]
    queue.take(tasks[0])
    queue.take(tasks[2])
    assert queue.turns_taken == 12
    assert queue.first("m") is None
    assert [queue.turn(task) for task in (tasks[1], tasks[3])] == [11, 13]
    queue.end_dispatch()
    assert [queue.turn(task) for task in (tasks[1], tasks[3])] == [12, 13]


def test_it_is_as_a_list_that_is_sorted_each_time(queue: TenantQueue) -> None:
    draw = random.Random(7)
    plain: list[tuple[int, Task]] = []
    for _ in range(500):
        if plain and draw.random() < 0.4:
            _, task = plain.pop(draw.randrange(len(plain)))
            if draw.random() < 0.5:
                queue.discard(task)
            else:
                queue.take(task)
                queue.end_dispatch()
        else:
            (task,), number = make_tasks(1, draw.choice("mn")), draw.randrange(20)
            plain.append((number, task))
            queue.add(task, number, None)
        ordered = [task for _, task in sorted(plain, key=lambda each: each[0])]
        assert [queue.turn(task) - queue.turns_taken for task in ordered] == list(range(len(plain)))
        for model_id in "mn":
            of_model = [task for task in ordered if task.call.model_id == model_id]
            assert queue.first(model_id) is (of_model[0] if of_model else None)
