"""KV transfers: what comes back is what was kept, in the order of the calls, or is known to be lost."""

import errno
import os
import random
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.engine.runner.kv_transfer import DiskTier, HostTier, KVTransfer
from jaxctx.errors import DataLoss

SHAPE, DTYPE = (2, 2, 1, 4, 8), np.dtype(np.uint16)
SLOTS = 8


def page(value: int) -> np.ndarray:
    return np.full(SHAPE, value, DTYPE)


class WithHost(DiskTier):
    """A disk, and the host slots that transfers keep beside it."""

    def __init__(self, path: Path, slots: int, shape: tuple[int, ...], dtype: Any, host: HostTier, **others: Any):
        super().__init__(path, slots, shape, dtype, **others)
        self._host = host

    def spill(self, host_slot: int, disk_slot: int) -> None:
        super().spill(self._host.entry(host_slot), disk_slot)

    def fetch(self, disk_slot: int, host_slot: int) -> Any:
        future = super().fetch(disk_slot)
        self._host.put(host_slot, future)
        return future


def arrived(host: HostTier, slot: int) -> np.ndarray:
    held = host.entry(slot)
    if isinstance(held, Future):
        wait([held], timeout=10)
    assert host.is_ready(slot)
    return np.asarray(host.page(slot))


class Numbers:
    """In place of a device: pages are numbers, and each call is told apart."""

    def __init__(self) -> None:
        self.pages = list(range(6))
        self.calls: list[str] = []

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self.calls.append("copy")
        for source, target in zip(sources, targets, strict=True):
            self.pages[target] = self.pages[source]

    def save_pages(self, pages: list[int]) -> list[int]:
        self.calls.append("save")
        return [self.pages[page] for page in pages]

    def load_pages(self, pages: list[int], data: list[int]) -> None:
        self.calls.append("load")
        assert len(set(pages)) == len(pages)  # which of two would stay is not said
        for page, value in zip(pages, data, strict=True):
            self.pages[page] = value


@pytest.fixture
def host() -> HostTier:
    return HostTier()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def disk(host: HostTier, path: Path):
    tier = WithHost(path, SLOTS, SHAPE, DTYPE, host, pending=100)
    yield tier
    tier.close()


class Gate:
    """Holds all writes to files until it is opened; then they go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = os.pwrite

        def pwrite(file, data, offset):
            assert self.open.wait(10)
            return real(file, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)


def test_a_host_slot_holds_what_was_put_last(host: HostTier) -> None:
    host.put(3, page(1))
    second = page(2)
    host.put(3, second)
    assert host.is_ready(3)
    assert host.page(3) is second
    host.remove(3)
    host.remove(3)
    with pytest.raises(KeyError):
        host.page(3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "uint32"])
def test_pages_of_every_type_come_back_as_they_were(host: HostTier, path: Path, kind: str) -> None:
    data = jax.random.normal(jax.random.key(1), (2, 1, 1, 4, 1)).astype(kind)
    tier = WithHost(path, 3, data.shape, np.dtype(jnp.dtype(kind)), host)
    host.put(0, data)
    tier.spill(0, 2)
    host.put(0, data * 2)  # the slot is used again at once
    tier.fetch(2, 1)
    got = arrived(host, 1)
    assert got.dtype == data.dtype
    assert got.tobytes() == np.asarray(data).tobytes()
    tier.close()


def test_reused_slots_never_mix(host: HostTier, disk: WithHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is asked for while the disk stands still: each read is of the write before it, not of a later one."""
    gate = Gate(monkeypatch)
    for value in range(5):
        host.put(0, page(value))
        disk.spill(0, 3)
        disk.fetch(3, 10 + value)
    disk.fetch(3, 0)
    host.put(0, page(99))  # given to other data while a fetch to it is on its way
    assert not host.is_ready(10)
    gate.open.set()
    assert [arrived(host, 10 + value)[0, 0, 0, 0, 0] for value in range(5)] == list(range(5))
    assert arrived(host, 0)[0, 0, 0, 0, 0] == 99


def test_a_page_on_its_way_from_disk_may_be_spilled(host: HostTier, disk: WithHost) -> None:
    """Also to slots of the other thread, to and fro."""
    host.put(0, page(7))
    disk.spill(0, 0)
    for step in range(40):
        disk.fetch(step % SLOTS, step % 2)
        disk.spill(step % 2, (step + 1) % SLOTS)
    disk.fetch(40 % SLOTS, 5)
    assert np.array_equal(arrived(host, 5), page(7))


def test_random_moves_equal_tables_of_numbers(host: HostTier, disk: WithHost) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    in_host, on_disk = dict.fromkeys(range(4), 0), {}
    for slot in in_host:
        host.put(slot, page(0))
    for value in range(1, 600):
        slot, other = rng.randrange(4), rng.randrange(SLOTS)
        match rng.choice(["put", "spill", "fetch", "get"]):
            case "put":
                host.put(slot, page(value))
                in_host[slot] = value
            case "spill":
                disk.spill(slot, other)
                on_disk[other] = in_host[slot]
            case "fetch" if other in on_disk:
                disk.fetch(other, slot)
                in_host[slot] = on_disk[other]
            case "get":
                assert np.array_equal(arrived(host, slot), page(in_host[slot]))


def lost(host: HostTier, disk: WithHost, slot: int) -> str:
    disk.fetch(slot, 50)
    with pytest.raises(DataLoss) as error:
        arrived(host, 50)
    return str(error.value)


def test_a_full_disk_loses_the_page_and_not_the_tier(
    host: HostTier, disk: WithHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host.put(0, page(1))
    disk.spill(0, 2)
    disk.fetch(2, 1)
    assert np.array_equal(arrived(host, 1), page(1))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        disk.spill(0, 2)
        disk.spill(0, 4)
        assert "not kept" in lost(host, disk, 2)  # nor is what was in the slot before taken for it
        assert "not kept" in lost(host, disk, 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    disk.spill(50, 6)  # a page that is lost already
    assert "not kept" in lost(host, disk, 6)
    disk.spill(0, 2)
    disk.fetch(2, 1)
    assert np.array_equal(arrived(host, 1), page(1))


def test_writes_and_reads_may_be_short(host: HostTier, disk: WithHost, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:9]], at))
    host.put(0, np.arange(np.prod(SHAPE), dtype=DTYPE).reshape(SHAPE))
    disk.spill(0, 5)
    disk.fetch(5, 1)
    assert np.array_equal(arrived(host, 1), host.page(0))


def test_a_damaged_page_is_lost(host: HostTier, disk: WithHost, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.put(0, page(3))
    for slot in range(4):
        disk.spill(0, slot)
        disk.fetch(slot, 10 + slot)
        arrived(host, 10 + slot)
    size = page(0).nbytes
    assert path.stat().st_size == SLOTS * size
    with path.open("r+b") as file:
        file.seek(2 * size - 1)
        file.write(bytes([1 << 6]))
        file.truncate(4 * size - 1)
    assert "not as it was written" in lost(host, disk, 1)
    assert "not as it was written" in lost(host, disk, 3)
    disk.fetch(2, 20)
    assert np.array_equal(arrived(host, 20), page(3))
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    assert "I/O error" in lost(host, disk, 2)


def test_more_than_may_wait_is_lost(host: HostTier, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    disk = WithHost(path, SLOTS, SHAPE, DTYPE, host, pending=2)
    host.put(0, page(1))
    disk.spill(0, 0)
    disk.fetch(0, 1)
    disk.spill(0, 1)
    disk.spill(0, 0)
    gate.open.set()
    assert np.array_equal(arrived(host, 1), page(1))
    assert "not kept" in lost(host, disk, 0)
    disk.spill(0, 0)  # there is room again
    disk.fetch(0, 1)
    assert np.array_equal(arrived(host, 1), page(1))
    disk.close()


def test_the_file_is_new_sparse_private_and_gone_at_the_end(host: HostTier, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"untouched")
    path = tmp_path / "pages"
    path.symlink_to(other)  # what lies there from a former run, whatever it is, is replaced and not written to
    disk = WithHost(path, 1 << 20, SHAPE, DTYPE, host)
    state = path.lstat()
    assert (state.st_mode & 0o777, state.st_size) == (0o600, page(0).nbytes << 20)
    assert state.st_blocks * 512 < 1 << 20
    disk.close()
    assert not path.exists()
    assert other.read_bytes() == b"untouched"


def test_closing_waits_for_nothing_that_is_queued(host: HostTier, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    disk = WithHost(path, SLOTS, SHAPE, DTYPE, host)
    host.put(0, page(1))
    for slot in range(SLOTS):
        disk.spill(0, slot)
        disk.fetch(slot, 10 + slot)
    threading.Timer(0.1, gate.open.set).start()
    disk.close()
    for slot in range(SLOTS):
        with pytest.raises(DataLoss):
            host.is_ready(10 + slot)
        with pytest.raises(DataLoss):
            host.page(10 + slot)


def test_migration_of_a_device_take_effect_in_their_order() -> None:
    source = random.Random(7)
    for _ in range(300):
        device = Numbers()
        transfers = KVTransfer(device, 0, None)
        pages, slots, moves = list(range(6)), dict[int, int](), list[Move]()
        for _ in range(source.randrange(1, 20)):
            page, slot = source.randrange(6), source.randrange(3)
            match source.choice([MoveKind.COPY, MoveKind.SAVE, MoveKind.LOAD, MoveKind.LOAD, MoveKind.DROP]):
                case MoveKind.COPY:
                    other = source.randrange(6)
                    moves.append(Move(MoveKind.COPY, page, other))
                    pages[other] = pages[page]
                case MoveKind.SAVE:
                    moves.append(Move(MoveKind.SAVE, page, slot))
                    slots[slot] = pages[page]
                case MoveKind.LOAD if slot in slots:
                    moves.append(Move(MoveKind.LOAD, slot, page))
                    pages[page] = slots[slot]
                case MoveKind.DROP if slot in slots:
                    moves.append(Move(MoveKind.DROP, slot))
                    del slots[slot]
        transfers.carry_out(moves)
        assert device.pages == pages
        assert {slot: transfers.host.page(slot) for slot in range(3) if slot in slots} == slots
        assert len(transfers.host) == len(slots)


def test_pages_that_are_dropped_as_they_are_loaded_are_loaded_together() -> None:
    device, dropped = Numbers(), list[int]()
    transfers = KVTransfer(device, 0, None)
    for slot in range(3):
        data: Future[int] = Future()
        data.set_result(slot + 10)
        transfers.stage(slot, data, lambda slot=slot: dropped.append(slot))
    transfers.carry_out(
        [each for slot in range(3) for each in (Move(MoveKind.LOAD, slot, slot), Move(MoveKind.DROP, slot))]
    )
    assert (device.pages, device.calls) == ([10, 11, 12, 3, 4, 5], ["load"])
    assert (len(transfers.host), dropped) == (0, [0, 1, 2])
