"""Overrides of pages: switches of adapters, beside those of attention."""

from __future__ import annotations

import itertools

from jaxctx.cache.attention_overrides import encode_override, encode_page_overrides
from jaxctx.cache.overrides import NO_OVERRIDES, Overrides, switched
from jaxctx.types import AdapterSpan

from .stateful.keys import page_overrides


def span(start: int, revision: str) -> AdapterSpan:
    return AdapterSpan(start=start, adapter=f"name of {revision}", adapter_revision=revision)


def test_a_page_has_the_switches_that_are_in_it() -> None:
    overrides = Overrides({5: encode_override(5, 9)}, (span(3, "a"), span(4, ""), span(7, "b"), span(8, "a")))
    attention = encode_override(5, 9)
    assert page_overrides(overrides.of_page(4, 4), 4, "a") == [(b"", ""), (attention, ""), (b"", ""), (b"", "b")]
    assert overrides.of_page(0, 3) == b""
    assert overrides.of_page(9, 4) == b""
    assert overrides
    assert Overrides({}, (span(1, "a"),))
    assert not NO_OVERRIDES


def test_without_switches_it_is_as_if_there_were_none() -> None:
    attention = {5: encode_override(5, 9)}
    assert Overrides(attention).of_page(4, 4) == encode_page_overrides(attention, 4, 4)
    assert Overrides(attention, (span(8, "a"),)).of_page(4, 4) == encode_page_overrides(attention, 4, 4)


def test_no_two_pages_of_other_adapters_have_the_same_bytes() -> None:
    """All ways to give two tokens one of some adapters, with and without overrides of attention that look like them."""
    revisions = ["", "a", "aa", "\x00"]
    seen: dict[bytes, object] = {}
    for adapters in itertools.product(revisions, repeat=2):
        for attention in ({}, {0: b"a\x00\x00\x00"}, {1: b"\xff\xff\xff\xff"}):
            spans = [span(0, "before")]
            for start, revision in enumerate(adapters, 2):
                spans = [*switched(spans, span(start, revision))]
            page = Overrides({2 + at: override for at, override in attention.items()}, tuple(spans[1:])).of_page(2, 2)
            case = (adapters, tuple(attention.items()))
            assert seen.setdefault(page, case) == case
    assert len(seen) == 3 * len(revisions) ** 2


def test_equal_sequences_have_equal_spans() -> None:
    first = [span(0, "a")]
    assert switched(first, span(0, "b")) == (span(0, "b"),)
    assert switched(first, span(5, "a")) == (span(0, "a"),)
    assert switched([*first, span(5, "b")], span(5, "c")) == (span(0, "a"), span(5, "c"))
    assert switched([*first, span(5, "b")], span(5, "a")) == (span(0, "a"),)
    renamed = AdapterSpan(start=5, adapter="another name", adapter_revision="a")
    assert switched(first, renamed) == (span(0, "a"),)
