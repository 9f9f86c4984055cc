"""Expected objects: which pages the objects of a store may hold, must hold, and do hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jaxctx.store import ContextRecord
from jaxctx.store.objects import Objects
from jaxctx.store.pages import GRACE_S
from tests.jaxctx.store.builders import PAGE_BYTES

from .oracle import Content, Kept, contents, data_of


class ExpectedObjects:
    """Of stores that are opened on the same objects, one after the other."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Content] = {}  # by their data, all that were ever saved
        self._present: set[Content] = set()  # what is stored, or was until the next look
        self._doubled: set[Content] = set()  # of this, what was stored by two saves at once, and may be yet again
        self._left: set[str] = set()  # manifests of earlier stores that no name knew when this one began
        self._inherited: set[str] = set()  # packs of earlier stores
        self._unclear: set[str] = set()  # of these, those that may stay although nobody needs them
        self._strange: set[str] = set()  # manifests and packs that could be somebody's who saves just now

    def reopen(self, objects: Objects, live: list[Kept], over: list[Kept]) -> None:
        """Objects of others are left alone for some time. Names may know of some that are `over`, or not."""
        manifests, packs = {*objects.list("manifests/")}, {*objects.list("packs/")}
        pages = {pack: {*self._pages_of(objects, pack)} for pack in packs}
        clear, known = _contents(live) - self._doubled, _contents(live) | _contents(over)
        self._left, self._inherited = manifests - _manifests(live), packs
        self._unclear = {pack for pack in packs if self._left or not clear & pages[pack]}
        self._strange = self._left - _manifests(over) | {pack for pack in packs if not known & pages[pack]}

    def forget_others(self) -> None:
        """Long after: what others left and nobody needs has to go."""
        self._left, self._inherited, self._unclear = set(), set(), set()

    def check_missing(self, missing: Collection[Content], pages: Iterable[Content], live: Iterable[Kept]) -> None:
        """Those of a new save that the store asks for."""
        assert not {*missing} & (_contents(live) - self._doubled), "a page that is stored is to be stored again"
        assert {*pages} - self._present <= {*missing}, "a page that is not stored is not asked for"

    def add(self, content: Content) -> bytes:
        """The data of a page that is about to be stored."""
        self._doubled |= {content} & self._present
        self._present.add(content)
        data = data_of(content)
        self._pages[data] = content
        return data

    def attach(self, attachment: bytes) -> None:
        """An attachment was stored; it is as long as a page, and unlike any other."""
        content: Content = ("attachment", attachment)
        self._pages[attachment] = content
        self._present.add(content)

    def give_up(self, added: set[Content]) -> None:
        """The save that added these came to nothing."""
        self._present -= added - self._doubled

    def compare(
        self,
        objects: Objects,
        now: float,
        live: list[Kept],
        over: list[Kept],
        opened: Iterable[str],
        used: Sequence[ContextRecord],
        attached: Iterable[bytes],
    ) -> None:
        """After a collection: the objects, and who needs them.

        Versions that are `over` may still be there; manifests that are `opened` must be; pages may also be there
        because somebody has `used` them, and attachments because somebody has `attached` them to what is read.
        """
        names = {_parsed(key) for key in objects.list("names/")}
        assert {kept.name for kept in live} <= names <= {kept.name for kept in (*live, *over)}
        needed = _manifests(live) | {*opened}
        manifests = {*objects.list("manifests/")}
        assert needed <= manifests <= needed | self._left | _manifests(over)
        in_use: set[Content] = {content for lineage in used for content in contents(lineage)}
        in_use |= {("attachment", attachment) for attachment in attached}
        wanted, clear = _contents(live) | _contents(over) | in_use, _contents(live) - self._doubled
        stored: Counter[Content] = Counter()
        packs = objects.list("packs/")
        self._strange = {one for one in self._strange if int(one.partition("-")[0], 16) + GRACE_S >= now}
        assert self._strange <= manifests | {*packs}, "somebody may be saving this"
        for pack in packs:
            pages = self._pages_of(objects, pack)
            assert pack in self._unclear or wanted & {*pages}, "a pack that nobody needs"
            if pack in self._inherited and not clear & {*pages}:
                self._unclear.add(pack)  # its manifest may be gone while it is in use: nothing tells whose it was
            stored.update(pages)
        assert _contents(live) <= stored.keys()
        assert {content for content, count in stored.items() if count > 1} <= self._doubled
        self._present &= stored.keys() | in_use
        self._doubled &= self._present

    def _pages_of(self, objects: Objects, pack: str) -> list[Content]:
        data, _ = objects.read(f"packs/{pack}")()
        assert data is not None
        return [self._pages[data[start : start + PAGE_BYTES]] for start in range(0, len(data), PAGE_BYTES)]


def _parsed(key: str) -> tuple[str, str]:
    tenant, name = (bytes.fromhex(part[1:]).decode() for part in key.split("/"))
    return tenant, name


def _contents(versions: Iterable[Kept]) -> set[Content]:
    return {content for kept in versions for content in kept.contents}


def _manifests(versions: Iterable[Kept]) -> set[str]:
    return {kept.version.manifest for kept in versions}
