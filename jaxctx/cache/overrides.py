"""Overrides: what of a sequence's tokens was not computed in the default way, and by which adapters the later ones are.

By default a token has the position of its index, attends to everything up to itself, and is computed with the adapter
of the sequence's identity. `cache.attention_overrides` are about the first two. A switch is about the third: from an
index on, another adapter computes, or none. Keys and values depend on all of it, so overrides are part of a page's
identity.

    overrides of a page:  those of its attention; then for each switch in it, ascending:
                          ~offset, length of the revision, revision      ~offset and length int32; length in bytes

A switch's offset is written as its complement, which is negative: it is never mistaken for that of an attention
override. A page in which no switch lies goes on with the adapter of the page before it, which that page's identity has.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxctx.cache.attention_overrides import encode_page_overrides
from jaxctx.types import AdapterSpan

MAX_SWITCHES = 100  # of one context: they are in each of its descriptions


@dataclass(frozen=True, slots=True)
class Overrides:
    """The overrides of one sequence. Nobody changes what it holds.

    No switch begins at 0 or goes on with the adapter before it, so that equal sequences have equal overrides.
    """

    attention: Mapping[int, bytes]  # by token index, see `cache.attention_overrides`
    switches: tuple[AdapterSpan, ...] = ()  # ascending

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.attention or self.switches)

    def of_page(self, first: int, size: int) -> bytes:
        """The overrides of the page whose tokens have the indices `first .. first + size - 1`; b"" if it has none."""
        page = encode_page_overrides(self.attention, first, size)
        for switch in self.switches[bisect_left(self.switches, first, key=_start_of) :]:
            if switch.start >= first + size:
                break
            revision = switch.adapter_revision.encode()
            page += array("i", [~(switch.start - first), len(revision)]).tobytes() + revision
        return page


NO_OVERRIDES = Overrides({})


def _start_of(span: AdapterSpan) -> int:
    return span.start


def switched(spans: Sequence[AdapterSpan], switch: AdapterSpan) -> tuple[AdapterSpan, ...]:
    """All spans after a switch at the end of a sequence; `spans` are those before it, the first one from 0.

    A span that has no token yet is replaced, and one that goes on with the adapter before it is none.
    """
    kept = [span for span in spans if span.start < switch.start]
    if not kept or kept[-1].adapter_revision != switch.adapter_revision:
        kept.append(switch)
    return tuple(kept)
