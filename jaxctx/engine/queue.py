"""The waiting queue: bounded, by priority, fair between tenants, first come first served within one.

Never skips the head of a class: a large request waits for its pages but small ones behind it do not starve it.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from jaxctx.engine.sequence import Sequence


class WaitingQueue:
    """Sequences that want to run. Tenants of equal priority take turns."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, deque[Sequence]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Queue it; `front` is for one that ran already and was preempted."""
        tenants = self._classes.setdefault(sequence.priority, OrderedDict())
        queue = tenants.setdefault(sequence.caller.tenant, deque())
        if front:
            queue.appendleft(sequence)
            tenants.move_to_end(sequence.caller.tenant, last=False)
        else:
            queue.append(sequence)
        self._count += 1

    def head(self) -> Sequence | None:
        """Who is next: the first of the tenant whose turn it is, in the highest class that anybody waits in."""
        if not self._classes:
            return None
        return next(iter(self._classes[max(self._classes)].values()))[0]

    def remove(self, sequence: Sequence, *, served: bool = False) -> bool:
        """Take it out; with `served` its tenant goes to the end of the turn order. False if it is not here."""
        for priority, tenants in self._classes.items():
            queue = tenants.get(sequence.caller.tenant)
            if queue is None or sequence not in queue:
                continue
            queue.remove(sequence)
            self._count -= 1
            if not queue:
                del tenants[sequence.caller.tenant]
            elif served:
                tenants.move_to_end(sequence.caller.tenant)
            if not tenants:
                del self._classes[priority]
            return True
        return False
