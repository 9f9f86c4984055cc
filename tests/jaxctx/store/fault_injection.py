"""Stores that are interrupted at the n-th call below them, and what must hold afterwards.

As a program it plays one scenario, for tests that kill it; see `main`.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from jaxctx.errors import JaxctxError
from jaxctx.store import SnapshotStore
from jaxctx.store.objects import open_objects
from jaxctx.store.records import decode_manifest

from .builders import START, Clock, check, lost_pages, open_store, save

ATTACHMENT = bytes(range(256)) * 40  # longer than what a loss of power leaves of it
LATER = 100_000.0  # seconds: whatever was left behind is old by then


class Interrupted:
    """Objects that call `point` before and after everything they do."""

    def __init__(self, objects, point: Callable[[], None]) -> None:
        self.objects, self.point = objects, point
        self.part_bytes = objects.part_bytes
        self.deletes_on_condition = objects.deletes_on_condition
        self.replies_may_be_lost = objects.replies_may_be_lost

    def _do(self, action):
        self.point()
        result = action()
        self.point()
        return result

    def _wait(self, wait):
        return lambda: self._do(wait)

    def list(self, prefix):
        return self._do(lambda: self.objects.list(prefix))

    def read(self, key):
        return self._wait(self.objects.read(key))

    def fetch(self, key, start, stop):
        return self._wait(self.objects.fetch(key, start, stop))

    def replace(self, key, value, expected):
        return self._do(lambda: self.objects.replace(key, value, expected))

    def write(self, key, parts):
        return self._wait(self._do(lambda: self.objects.write(key, parts)))

    def delete(self, key):
        self._do(lambda: self.objects.delete(key))

    def close(self):
        self.objects.close()


def _take(store):
    found = store.get("t", "a")
    reader = store.open(found)
    try:
        store.take(found, latest=True)
        lost_pages(reader)
    finally:
        reader.close()


SCENARIOS: dict[str, Callable[[SnapshotStore], object]] = {
    "save": lambda store: save(store, [*range(12), 50, 51], "new", attachment=ATTACHMENT),
    "overwrite": lambda store: save(store, [*range(14), 60, 61], "a", 1, attachment=ATTACHMENT[::-1]),
    "attach": lambda store: save(store, range(14), "a", 1, attachment=ATTACHMENT[::-1]),  # no new page
    "delete": lambda store: (store.remove("t", "a"), store.collect()),
    "take": lambda store: (_take(store), store.collect()),
    "update": lambda store: store.update("t", "a", labels={"k": "v"}),
    "collect": lambda store: store.collect(),
}
EVER_SAVED = ([*range(14), 60, 61], [*range(12), 50, 51], [*range(8), 70, 71], range(80, 90))


def prepare(objects) -> None:
    """Names to change, shared pages, and something to collect: a pack and its manifest."""
    store = open_store(objects, Clock(START - LATER), seed="before")
    save(store, range(14), "a", attachment=ATTACHMENT)
    save(store, [*range(8), 70, 71], "b")
    save(store, range(80, 90), "c", attachment=b"of what is removed")
    store.remove("t", "c")


def state(objects, seed="after"):
    """What is there, and that all of it is whole: name → version → (tokens, labels, attachment)."""
    store, found = open_store(objects, seed=seed), {}
    for latest in store.list("t"):
        for version in store.history("t", latest.name):
            reader = store.open(version)
            assert lost_pages(reader) == 0
            held = reader.lineage.tokens.tolist(), dict(version.labels), reader.attachment()
            assert len(held[2]) == version.attachment_bytes
            found.setdefault(latest.name, {})[version.version] = held
            reader.close()
    return found


def check_no_garbage(objects, store=None, clock=None) -> None:
    """After a collection, later, exactly what the versions need is there, and what is saved then is whole.

    Without a store: another process collects.
    """
    clock = clock or Clock()
    store = store or open_store(objects, clock, seed="collector")
    clock.now += LATER
    store.collect()
    versions = [version for latest in store.list("t") for version in store.history("t", latest.name)]
    assert set(objects.list("manifests/")) == {version.manifest for version in versions}
    needed = set()
    for version in versions:
        needed |= decode_manifest(objects.read(f"manifests/{version.manifest}")()[0], version.manifest).packs
    assert set(objects.list("packs/")) == needed
    for tokens in EVER_SAVED:
        save(store, tokens, "again")
        check(store, tokens, "again")
        store.remove("t", "again")
    store.collect()
    assert set(objects.list("packs/")) == needed


def files(root) -> set[str]:
    """Every file below, lock files too."""
    return {os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names}


def kill_at(count: int) -> Callable[[], None]:
    """Kills this process at the n-th call, counted from 0."""
    left = [count]

    def point() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return point


def play(root: str, scenario: str, point: Callable[[], None]) -> None:
    """Open and play; the process ends here."""
    objects = Interrupted(open_objects(root), point)
    SCENARIOS[scenario](open_store(objects, seed="now"))
    os.write(1, b"acknowledged\n")
    os._exit(0)


def say(line: str) -> None:
    """Print a line, even if an error that was meant for the store hits the first try."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())
        return
    os.write(1, f"{line}\n".encode())


def main(*arguments: str) -> None:
    """`kill SCENARIO ROOT…`: die at call 0 in the first root, at call 1 in the second, …; one line for each.

    `wait SCENARIO ROOT`: open, say "ready", wait for a line, play, say "acknowledged" or the reason of an error.
    """
    mode, scenario, *roots = arguments
    if mode == "kill":
        for count, root in enumerate(roots):
            child = os.fork()  # no thread has been started yet
            if child == 0:
                play(root, scenario, kill_at(count))
            status = os.waitpid(child, 0)[1]
            os.write(1, f"{status}\n".encode())
            if status == 0:
                break
        return
    objects = open_objects(roots[0])
    store = open_store(objects, clock := Clock(), seed="now")
    say("ready")
    sys.stdin.readline()
    try:
        SCENARIOS[scenario](store)
        say("acknowledged")
    except JaxctxError as error:
        say(error.reason)
    sys.stdin.readline()
    check_no_garbage(objects, store, clock)
    say("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
