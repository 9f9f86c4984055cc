"""Every bit flipped, every length cut: the right data or a loss that is told, never wrong data."""

import copy

import pytest

from jaxctx.errors import DataLoss, JaxctxError, NotFound
from jaxctx.store.objects import open_objects

from .builders import Clock, MemoryObjects, attachment_of, check, described, lineage, lost_pages, open_store, save
from .fault_injection import LATER, check_no_garbage

ATTACHED = b"what belongs to the snapshot"
TOKENS = [3, 1, 4, 1, 5, 9]  # two pages, the second partly filled


def _small():
    objects = MemoryObjects()
    store = open_store(objects)
    save(store, lineage([*TOKENS, 7], seq_len=6, attention_overrides={2: b"override"}))
    save(store, range(100, 104), "other")
    return objects


def _look(objects) -> str:
    """What became of the snapshot; anything but the right data or a loss fails."""
    store = open_store(objects, seed="b")
    assert {one.name for one in store.list("t")} <= {"a", "other"}
    check(store, range(100, 104), "other")
    try:
        version = store.get("t", "a")
        reader = store.open(version)
    except DataLoss:
        return "loss"
    assert (version.version, version.tokens, version.lifetime.at) == (1, 7, None)
    assert reader.lineage.tokens.tolist() == [*TOKENS, 7]
    assert reader.lineage.attention_overrides == {2: b"override"}
    lost = lost_pages(reader)
    reader.close()
    return f"{lost} pages"


def _mine(objects) -> list[str]:
    """The objects of the snapshot `a`: its name, manifest and pack."""
    version = open_store(objects, seed="b").get("t", "a")
    pack = next(key for key, value in objects.values.items() if key.startswith("packs/") and len(value) == 64)
    return [next(key for key in objects.values if key.endswith("/n61")), f"manifests/{version.manifest}", pack]


@pytest.mark.parametrize("which", range(3))
def test_every_flipped_bit(which):
    objects = _small()
    key = _mine(objects)[which]
    whole, seen = objects.values[key], set()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        objects.values[key] = bytes(damaged)
        seen.add(_look(objects))
    assert seen == {"1 pages"} if which == 2 else seen == {"loss"}


@pytest.mark.parametrize("which", range(3))
def test_every_truncation(which):
    objects = _small()
    key = _mine(objects)[which]
    whole, seen = objects.values[key], set()
    for length in range(len(whole)):
        objects.values[key] = whole[:length]
        seen.add(_look(objects))
    assert seen == {"1 pages", "2 pages"} if which == 2 else seen == {"loss"}
    objects.values[key] = whole + b"what a longer value left behind"
    assert _look(objects) == "0 pages"


def test_records_that_changed_places():
    objects = _small()
    name, manifest, _ = _mine(objects)
    others = {key for key in objects.values if key.startswith(("names/", "manifests/"))} - {name, manifest}
    for mine, other in ((name, "names/"), (manifest, "manifests/")):
        swapped = copy.deepcopy(objects)
        swapped.values[mine] = objects.values[next(key for key in others if key.startswith(other))]
        assert _look(swapped) == "loss"


def test_damage_in_a_directory(tmp_path):
    objects = open_objects(str(tmp_path))
    store = open_store(objects)
    save(store, range(40))
    save(store, range(40, 80), "b")
    pack = max((tmp_path / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data[:-1])
    lost = {}
    for name in ("a", "b"):
        reader = store.open(store.get("t", name))
        lost[name] = [number for number, page in reader.read(range(10)) if page is None]
        reader.close()
    assert sorted(lost.values()) == [[], [3, 9]]
    pack.unlink()
    for name in ("a", "b"):
        reader = store.open(store.get("t", name))
        lost[name] = lost_pages(reader)
        reader.close()
    assert sorted(lost.values()) == [0, 10]
    objects.close()


def test_a_damaged_name_can_be_deleted_and_nothing_else():
    objects = _small()
    name, manifest, pack = _mine(objects)
    found = open_store(objects, seed="c").get("t", "a")
    objects.values[name] = b"rubbish"
    store = open_store(objects, clock := Clock(), seed="b")
    clock.now += LATER
    for call in (
        lambda: store.get("t", "a"),
        lambda: store.history("t", "a"),
        lambda: store.put(described()),
        lambda: store.take(found, latest=True),
        lambda: store.update("t", "a", labels={}),
        lambda: store.check("t", "a"),
    ):
        with pytest.raises((DataLoss, NotFound)):
            call()
    assert [one.name for one in store.list("t")] == ["other"]
    assert objects.values[name] == b"rubbish"
    store.collect()
    assert {manifest, pack} <= objects.values.keys()  # perhaps somebody can repair the name
    store.remove("t", "a")
    assert name not in objects.values
    with pytest.raises(NotFound):
        store.get("t", "a")
    save(store, range(4))
    check_no_garbage(objects)


def test_pages_of_a_damaged_manifest_are_kept_until_it_is_deleted():
    objects = _small()
    _, manifest, pack = _mine(objects)
    objects.values[manifest] = objects.values[manifest][:-1]
    store = open_store(objects, clock := Clock(), seed="b")
    clock.now += LATER
    store.remove("t", "other")
    store.collect()
    assert pack in objects.values
    with pytest.raises(JaxctxError):
        store.open(store.get("t", "a"))
    store.remove("t", "a")
    check_no_garbage(objects)
    assert not objects.values


def test_a_lost_page_is_stored_again():
    objects = _small()
    pack = _mine(objects)[2]
    objects.values[pack] = objects.values[pack][:40]
    store = open_store(objects, seed="b")
    held = lineage([*TOKENS, 7], seq_len=6, attention_overrides={2: b"override"})
    assert save(store, held, "unnoticed")[1] == 0
    reader = store.open(store.get("t", "a"))
    assert lost_pages(reader) == 1
    reader.close()
    assert save(store, held, "again")[1] == 1
    reader = store.open(store.get("t", "again"))
    assert lost_pages(reader) == 0


def _with_attachment():
    """A store with a snapshot that has an attachment, its objects, and the key of the attachment."""
    objects = MemoryObjects()
    save(open_store(objects), TOKENS, attachment=ATTACHED)
    (key,) = (key for key, value in objects.values.items() if value == ATTACHED)
    return objects, key


def _attachment_lost(objects) -> bool:
    """Whether the attachment is told to be lost; a wrong one fails. The pages are whole in any case."""
    store = open_store(objects, seed="b")
    check(store, TOKENS)
    try:
        assert attachment_of(store) == ATTACHED
    except DataLoss:
        return True
    return False


def test_every_flipped_bit_of_an_attachment_is_a_loss():
    objects, key = _with_attachment()
    assert not _attachment_lost(objects)
    for bit in range(len(ATTACHED) * 8):
        damaged = bytearray(ATTACHED)
        damaged[bit // 8] ^= 1 << bit % 8
        objects.values[key] = bytes(damaged)
        assert _attachment_lost(objects)


def test_every_truncation_of_an_attachment_is_a_loss():
    objects, key = _with_attachment()
    for length in range(len(ATTACHED)):
        objects.values[key] = ATTACHED[:length]
        assert _attachment_lost(objects)
    del objects.values[key]
    assert _attachment_lost(objects)


def test_an_attachment_in_the_place_of_another_is_a_loss():
    objects, key = _with_attachment()
    objects.values[key] = ATTACHED[::-1]
    assert _attachment_lost(objects)


def test_a_damaged_attachment_in_a_directory_is_a_loss(tmp_path):
    objects = open_objects(str(tmp_path))
    store = open_store(objects)
    save(store, TOKENS, attachment=ATTACHED)
    assert attachment_of(store) == ATTACHED
    (file,) = (file for file in (tmp_path / "packs").iterdir() if file.read_bytes() == ATTACHED)
    file.write_bytes(ATTACHED[:-1])
    with pytest.raises(DataLoss):
        attachment_of(store)
    file.unlink()
    with pytest.raises(DataLoss):
        attachment_of(store)
    store.remove("t", "a")  # it can be deleted all the same
    assert store.collect() > 0
    objects.close()
