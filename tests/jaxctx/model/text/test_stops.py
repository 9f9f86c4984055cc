from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxctx.model.text import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """A character at a time: the first moment at which the text ends with a stop string; the longest of them."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def stream(text: str, stops: list[str], cuts: list[int], include: bool = False) -> tuple[str, str | None]:
    matcher, out = StopMatcher(stops, include_stop=include), ""
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        emitted, match = matcher.push(text[start:end])
        out += emitted
        assert naive(text, stops, include)[0].startswith(out), "emitted what a stop string takes back"
        if match is not None:
            assert matcher.push("more") == ("", match)
            assert matcher.finish() == ""
            return out, match
    return out + matcher.finish(), None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_equals_the_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert stream(text, stops, cuts, include) == naive(text, stops, include)


def test_holds_back_only_what_could_become_a_stop_string() -> None:
    matcher = StopMatcher(["\n\nHuman:", "###"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("world #") == ("\nworld ", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push(" no") == ("## no", None)
    assert matcher.push("\n\nHuman") == ("", None)
    assert matcher.push(": hi") == ("", "\n\nHuman:")


def test_the_longest_of_those_complete_at_once() -> None:
    assert stream("xxabcd", ["cd", "abcd"], [3]) == ("xx", "abcd")
    assert stream("xxabcd", ["bc", "abcd"], [3]) == ("xxa", "bc")


def test_include_keeps_the_match_and_nothing_after() -> None:
    assert StopMatcher(["END"], include_stop=True).push("the END of it") == ("the END", "END")


def test_no_stops_pass_everything_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_the_largest_allowed_set() -> None:
    rng = random.Random(0)
    stops = ["".join(rng.choice("ab") for _ in range(256)) for _ in range(16)]
    text = "".join(rng.choice("ab") for _ in range(2000))
    matcher, out = StopMatcher(stops), ""
    for at in range(0, len(text), 5):
        out += matcher.push(text[at : at + 5])[0]
    emitted, match = matcher.push(stops[7] + "tail")
    assert match == stops[7]
    assert out + emitted == text


def test_characters_beyond_the_basic_plane() -> None:
    assert stream("ok 👩‍👩‍👧 done", ["👩‍👧"], [4, 5, 6]) == ("ok 👩‍", "👩‍👧")
