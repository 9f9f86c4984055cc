"""SIGKILL and I/O errors at the system calls of a running save, delete, take and collection, injected by strace.

strace counts the calls of each thread apart, so `n` is the n-th call of whichever thread comes first.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxctx.store.objects import open_objects

from .builders import open_store
from .fault_injection import SCENARIOS, check_no_garbage, files, prepare, state

ROOT = Path(__file__).parents[3]
CALLS = (
    "openat,write,writev,pwrite64,preadv,read,fsync,fdatasync,rename,renameat,unlink,unlinkat,mkdir,close,fcntl,fstat,"
    "newfstatat,ftruncate,getdents64"
)
SAMPLE = [  # the quick ones
    ("save", "openat", 3),
    ("save", "write", 1),
    ("save", "fsync", 2),
    ("save", "writev", 1),
    ("save", "rename", 1),
    ("overwrite", "fsync", 2),
    ("overwrite", "rename", 1),
    ("delete", "unlink", 2),
]
ERRORS = [
    ("save", "fsync", "EIO", 1),
    ("save", "fsync", "EIO", 2),
    ("save", "writev", "ENOSPC", 1),
    ("save", "write", "ENOSPC", 1),
    ("overwrite", "rename", "EIO", 1),
    ("take", "fsync", "EIO", 1),
    ("take", "unlink", "EIO", 1),
]


class Traced:
    """The scenario program, held before it plays, with strace attached to it."""

    def __init__(self, scenario: str, root: Path, *options: str) -> None:
        program = [sys.executable, "-m", "tests.jaxctx.store.fault_injection", "wait", scenario, str(root)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            program, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.log = root.with_suffix(".trace")
        self.strace = None
        try:
            assert self.say() == "ready"
            command = ["strace", "-f", "-p", str(self.process.pid), "-o", str(self.log), *options]
            self.strace = subprocess.Popen(command, stderr=pipe, text=True)
            attached = self.strace.stderr.readline()
            if "attached" not in attached:
                pytest.skip(f"strace may not attach to processes here: {attached.strip()}")
        except BaseException:
            self.end()
            raise

    def say(self, line: str | None = None) -> str:
        """Send a line; what comes back, "" from a dead process."""
        if line is not None:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def detach(self) -> None:
        """No more injections from here on."""
        self.strace.terminate()
        self.strace.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.strace is not None:
            self.strace.wait()
            self.strace.stderr.close()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def traced():
    """Starts `Traced` programs and ends them."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    started = []

    def start(*arguments) -> Traced:
        started.append(Traced(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory to start from, what it holds, and what it holds after each scenario."""
    root = tmp_path_factory.mktemp("start")
    objects = open_objects(str(root))
    prepare(objects)
    old, new = state(objects), {}
    objects.close()
    for scenario, play in SCENARIOS.items():
        objects = open_objects(str(shutil.copytree(root, tmp_path_factory.mktemp("whole") / scenario)))
        play(open_store(objects, seed="now"))
        new[scenario] = state(objects)
        objects.close()
    return root, old, new


def _kill(traced, start, tmp_path, scenario: str, call: str, number: int) -> bool:
    """Whether the process died of it; what must hold then."""
    origin, old, new = start[0], start[1], start[2][scenario]
    root = tmp_path / f"{scenario}-{call}-{number}"
    shutil.copytree(origin, root)
    program = traced(scenario, root, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}")
    said = program.say("go")
    died = said == ""
    program.end()
    objects = open_objects(str(root))
    found = state(objects)
    assert found in (old, new) if died else found == new
    check_no_garbage(objects)
    assert state(objects, "again") == found
    assert not [file for file in files(root) if file.endswith(".__lock")]
    objects.close()
    shutil.rmtree(root)
    return died


@pytest.mark.parametrize(("scenario", "call", "number"), SAMPLE)
def test_killed_at_some_system_calls(traced, start, tmp_path, scenario, call, number):
    assert _kill(traced, start, tmp_path, scenario, call, number)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_system_call(traced, start, tmp_path, scenario):
    root = tmp_path / "counted"
    shutil.copytree(start[0], root)
    program = traced(scenario, root, "-e", f"trace={CALLS}")
    assert program.say("go") == "acknowledged"
    program.end()
    counts: Counter[tuple[str, str]] = Counter()
    for line in program.log.read_text().splitlines():
        thread, _, call = line.partition(" ")
        counts[thread, call.strip().partition("(")[0]] += 1
    killed = 0
    for call in CALLS.split(","):
        most = max((count for (_, name), count in counts.items() if name == call), default=0)
        killed += sum(_kill(traced, start, tmp_path, scenario, call, number) for number in range(1, most + 1))
    assert killed > 10
    print(f"{scenario}: killed {killed} times; {counts.total()} system calls")


@pytest.mark.parametrize(("scenario", "call", "error", "number"), ERRORS)
def test_an_error_of_a_system_call(traced, start, tmp_path, scenario, call, error, number):
    origin, old, new = start[0], start[1], start[2][scenario]
    root = tmp_path / "root"
    shutil.copytree(origin, root)
    program = traced(scenario, root, "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={number}")
    said = program.say("go")
    program.detach()
    objects = open_objects(str(root))
    if said == "acknowledged":
        assert state(objects) == new
    else:
        assert said == ("STORE_FULL" if error == "ENOSPC" else "STORE_FAILED")
        assert state(objects) == old or scenario == "take"
    assert "INJECTED" in program.log.read_text()
    assert program.say("collect") == "clean"
    objects.close()
    assert os.path.isdir(root)
