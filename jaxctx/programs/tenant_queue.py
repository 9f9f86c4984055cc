"""The waiting tasks of one tenant, in the order in which they are placed.

All is kept in sorted lists, so that nothing is sorted when tasks are placed: to add, take or find one is a search by
halves, and a shift of up to some thousand pointers in one piece.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from jaxctx.programs.tasks import Task, TaskGroup

# What tasks have in common that go to one engine: their group or constant prefix, and their model.
UnitKey = tuple[TaskGroup | str, str]
K = TypeVar("K")


class Waiting(NamedTuple):
    """A task that waits. The least one is placed first; no two are equal before it comes to the task."""

    request_number: int
    arrival: int
    task: Task


class TenantQueue:
    """The waiting tasks of a tenant, and the turns that it has had.

    During a dispatch, tasks are taken; each of the others keeps the turn that it had when the dispatch began.
    """

    def __init__(self, number: int) -> None:
        """`number`: of two tenants whose turn it is, the one with the lower number goes first."""
        self.number = number
        self.turns_taken = 0
        self._arrivals = itertools.count()
        self._waiting: dict[Task, Waiting] = {}
        self._units: dict[Task, UnitKey] = {}  # of those that belong to one
        self._in_order: list[Waiting] = []  # all, and those that were taken in this dispatch
        self._of_model: dict[str, list[Waiting]] = {}
        self._of_unit: dict[UnitKey, list[Waiting]] = {}
        self._taken: list[Waiting] = []  # in this dispatch

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def models(self) -> Iterable[str]:
        """The models of its tasks."""
        return self._of_model.keys()

    def add(self, task: Task, request_number: int, unit: UnitKey | None) -> None:
        """Add a task behind those of the same number, unless it waits already. `unit`: of what goes to one engine."""
        if task in self._waiting:
            return
        waiting = Waiting(request_number, next(self._arrivals), task)
        self._waiting[task] = waiting
        insort(self._in_order, waiting)
        insort(self._of_model.setdefault(task.call.model_id, []), waiting)
        self._join(waiting, unit)

    def discard(self, task: Task) -> None:
        """Remove a task if it waits."""
        waiting = self._waiting.get(task)
        if waiting is not None:
            self._remove(waiting)
            _delete(self._in_order, waiting)

    def set_unit(self, task: Task, unit: UnitKey | None) -> None:
        """Change the unit of a task, if it waits."""
        waiting = self._waiting.get(task)
        if waiting is not None:
            self._leave(waiting)
            self._join(waiting, unit)

    def first(self, model_id: str) -> Task | None:
        """Return the first task of a model; None if there is none."""
        of_model = self._of_model.get(model_id)
        return of_model[0].task if of_model else None

    def turn(self, task: Task) -> int:
        """Return which turn of the tenant a task has: of all its tasks, whatever their models are."""
        first_turn = self.turns_taken - len(self._taken)
        return first_turn + bisect_left(self._in_order, self._waiting[task])

    def unit(self, first: Task, limit: int) -> list[Task]:
        """Return up to `limit` tasks that go to one engine with this one, which is the first of them."""
        key = self._units.get(first)
        if key is None:
            return [first][:limit]
        return [waiting.task for waiting in self._of_unit[key][:limit]]

    def take(self, task: Task) -> None:
        """Remove a task that is placed, which is a turn of the tenant. To be followed by `end_dispatch`."""
        waiting = self._waiting[task]
        self._remove(waiting)
        self._taken.append(waiting)
        self.turns_taken += 1

    def end_dispatch(self) -> None:
        """The tasks that are left move up."""
        for waiting in self._taken:
            _delete(self._in_order, waiting)
        self._taken.clear()

    def _remove(self, waiting: Waiting) -> None:
        """Remove it from all but the order."""
        self._leave(waiting)
        del self._waiting[waiting.task]
        _delete_of(self._of_model, waiting.task.call.model_id, waiting)

    def _join(self, waiting: Waiting, unit: UnitKey | None) -> None:
        if unit is not None:
            self._units[waiting.task] = unit
            insort(self._of_unit.setdefault(unit, []), waiting)

    def _leave(self, waiting: Waiting) -> None:
        unit = self._units.pop(waiting.task, None)
        if unit is not None:
            _delete_of(self._of_unit, unit, waiting)


def _delete(in_order: list[Waiting], waiting: Waiting) -> None:
    del in_order[bisect_left(in_order, waiting)]


def _delete_of(lists: dict[K, list[Waiting]], key: K, waiting: Waiting) -> None:
    """Remove it from one of these lists, and the list if nothing is left in it."""
    _delete(lists[key], waiting)
    if not lists[key]:
        del lists[key]
