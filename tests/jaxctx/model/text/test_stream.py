"""Text as it streams: detokenised when it is certain, and ended by stop strings.

Two kinds of tokenizer are built here: byte-level BPE as in Qwen and Llama 3, and metaspace with byte fallback as in
Mistral.
"""

from __future__ import annotations

import itertools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxctx.model.text import Detokenizer, StopMatcher, Tokenizer
from jaxctx.model.text.stream import MAX_PENDING, PRIMING
from tests.echo import echo_text

ECHO = echo_text().tokenizer


def mistral_like(*, prepend: bool = True, new_style: bool = False) -> Tokenizer:
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,!?"]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("h", "e"), ("l", "l")]
    entries += [first + second for first, second in merges]
    vocab = {entry: i for i, entry in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse()]
    if new_style:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.Metaspace("▁", prepend_scheme="first"), *parts])
    else:
        steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prepend else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prepend else []
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts, *strip])
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in entries[:3]]
    backend.add_special_tokens(special)
    return Tokenizer(backend)


TOKENIZERS = {
    "byte-level": ECHO,
    "metaspace": mistral_like(),
    "metaspace, no prefix": mistral_like(prepend=False),
    "metaspace decoder": mistral_like(new_style=True),
}
TEXTS = [
    "the cat, and the dog!",
    "  leading and  double   spaces ",
    "é👍漢字 mixed with the text",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "नमस्ते שלום مرحبا",
    "a literal \ufffd stays, and \ufffd",
    "line\nline\r\n\ttab",
    "",
]


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int] | None = None) -> list[str]:
    """The text of each batch of ids, which end at `cuts`, and that of `finish`."""
    detokenizer = Detokenizer(tokenizer, prompt or [])
    texts = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    return [*texts, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_pushed_one_by_one_give_the_text_of_all_at_once(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    texts = pieces(tokenizer, ids, list(range(1, len(ids))))
    assert "".join(texts) == tokenizer.decode(ids)
    assert name == "metaspace decoder" or tokenizer.decode(ids) == text  # that one drops all leading spaces
    # No character came out in parts, or the parts would be U+FFFD.
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in texts)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_split_of_a_short_text_gives_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(" é👍 the")
    assert 8 <= len(ids) <= 14
    for count in range(len(ids)):
        for cuts in itertools.combinations(range(1, len(ids)), min(count, 3)):
            assert "".join(pieces(tokenizer, ids, list(cuts))) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_behind_a_prompt_the_text_is_what_the_output_adds(name: str) -> None:
    """The leading space of a word in the middle of a text survives, also right after a special token."""
    tokenizer = TOKENIZERS[name]
    for text in TEXTS[:5]:
        ids = tokenizer.encode(text)
        for at in range(1, len(ids)):
            if tokenizer.decode(ids[:at]).endswith("\ufffd"):
                continue  # inside a character
            prompt = [*ids[:at], *sorted(tokenizer.special_ids)[:2]]
            output = "".join(pieces(tokenizer, ids[at:], list(range(1, len(ids) - at)), prompt))
            assert tokenizer.decode(ids[:at]) + output == tokenizer.decode(ids), (text, at)


def test_random_ids_of_a_byte_level_tokenizer_give_their_text() -> None:
    """Mostly broken UTF-8, from lone bytes to long runs of them, in random batches."""
    rng = random.Random(5)
    fragments = [0xF0, 0x9F, 0x91, 0x8D, 0xC3, 0xA9, 0xE2, 0x82, 65, 300, 256]
    for trial in range(3000):
        draw = [lambda: rng.randrange(512), lambda: rng.randrange(128, 256), lambda: rng.choice(fragments)][trial % 3]
        ids = [draw() for _ in range(rng.randrange(1, 60))]
        cuts = sorted(rng.sample(range(len(ids)), rng.randrange(len(ids))))
        assert "".join(pieces(ECHO, ids, cuts)) == ECHO.decode(ids), ids


@pytest.mark.parametrize("name", ["metaspace", "metaspace decoder"])
def test_broken_byte_fallback_loses_only_the_broken_characters(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    byte = {value: tokenizer.token_id(f"<0x{value:02X}>") or 0 for value in range(256)}
    the, a = tokenizer.token_id("▁the") or 0, tokenizer.token_id("a") or 0
    ids = [the, byte[0xC3], byte[0xA9], byte[0xF0], byte[0x9F], a, the, byte[0x82]]
    text = "".join(pieces(tokenizer, ids, list(range(1, len(ids)))))
    assert text.replace("\ufffd", "") == "theéa the"
    assert text.startswith("theé\ufffd")
    assert text.endswith(" the\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_ids_give_text_after_a_bounded_delay(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(9)
    for _ in range(300):
        ids = [rng.randrange(tokenizer._backend.get_vocab_size()) for _ in range(40)]
        detokenizer = Detokenizer(tokenizer)
        for token in ids:
            detokenizer.push([token]).encode()
            assert len(detokenizer._pending) <= 8
        detokenizer.finish().encode()


def test_special_tokens_are_not_shown() -> None:
    assert Detokenizer(ECHO).push([72, 256, 105]) == "Hi"


def test_an_unfinished_character_waits_and_breaks_only_at_the_end() -> None:
    detokenizer = Detokenizer(ECHO)
    assert [detokenizer.push([byte]) for byte in "👍".encode()] == ["", "", "", "👍"]
    assert detokenizer.push("漢".encode()[:2]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_prompt_that_ends_inside_a_character() -> None:
    detokenizer = Detokenizer(ECHO, list("漢".encode()[:2]))
    assert detokenizer.push([65]) == "A"
    detokenizer = Detokenizer(ECHO, list("漢".encode()[:2]))
    assert detokenizer.push([*"漢".encode()[2:], 65]).endswith("A")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_how_many_ids_come_at_once_makes_no_difference(name: str) -> None:
    """Whole characters and broken ones: the decoder replaces a run of bytes as a whole if any of it is broken, so that
    of one that sees all at once whole characters would be lost too.
    """
    tokenizer, rng = TOKENIZERS[name], random.Random(7)
    first = tokenizer.token_id("<0x00>") or 0
    whole = [tokenizer.encode(text, add_special_tokens=False) for text in ("é", "👍", "the", " ", "漢字")]
    parts = (b"\xc3", b"\xff", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xa9")
    broken = [[first + value for value in part] for part in parts]
    for _ in range(300):
        ids = [each for _ in range(rng.randint(1, 8)) for each in rng.choice(rng.choice([whole, broken]))]
        one_by_one = "".join(pieces(tokenizer, ids, list(range(1, len(ids)))))
        cuts = sorted(rng.sample(range(len(ids) + 1), rng.randint(0, min(3, len(ids)))))
        assert "".join(pieces(tokenizer, ids, cuts)) == one_by_one, (ids, cuts)


def test_bytes_that_complete_a_character_of_the_prompt_are_broken_alone() -> None:
    """The prompt's text is out already, so the character that both make together can no longer come."""
    detokenizer = Detokenizer(ECHO, list("é".encode()[:1]))
    assert detokenizer.push("é".encode()[1:]) + detokenizer.finish() == "\ufffd"


def test_finish_without_ids_is_empty() -> None:
    assert Detokenizer(ECHO).finish() == ""
    assert Detokenizer(ECHO, [72, 105]).finish() == ""


def test_only_the_last_tokens_of_a_prompt_are_needed() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    prompt, output = tokenizer.encode("the cat, and the dog the"), tokenizer.encode(" the")
    texts = {"".join(pieces(tokenizer, output, [], prompt[-count:])) for count in (PRIMING, len(prompt))}
    assert len(texts) == 1


def test_what_is_held_back_longer_than_a_character_comes_out_broken() -> None:
    detokenizer = Detokenizer(ECHO)
    texts = [detokenizer.push([0xFF]) for _ in range(MAX_PENDING + 1)]
    assert texts[:MAX_PENDING] == [""] * MAX_PENDING
    assert set(texts[MAX_PENDING]) == {"\ufffd"}


# --- Stop strings


def plain_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the first character at which it ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def match_in_pieces(text: str, stops: list[str], cuts: list[int], include: bool = False) -> tuple[str, str | None]:
    """What a matcher lets out of a text in pieces, which end at `cuts`, and the stop string that ended it."""
    matcher, let_out = StopMatcher(stops, include_stop=include), ""
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        emitted, match = matcher.push(text[start:end])
        let_out += emitted
        assert plain_search(text, stops, include)[0].startswith(let_out), "let out what a stop string takes back"
        if match is not None:
            assert matcher.push("more") == ("", match)
            assert matcher.finish() == ""
            return let_out, match
    return let_out + matcher.finish(), None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_a_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert match_in_pieces(text, stops, cuts, include) == plain_search(text, stops, include)


def test_holds_back_only_what_could_become_a_stop_string() -> None:
    matcher = StopMatcher(["\n\nHuman:", "###"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("world #") == ("\nworld ", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push(" no") == ("## no", None)
    assert matcher.push("\n\nHuman") == ("", None)
    assert matcher.push(": hi") == ("", "\n\nHuman:")


def test_of_stop_strings_complete_at_one_character_the_longest_ends_the_text() -> None:
    assert match_in_pieces("xxabcd", ["cd", "abcd"], [3]) == ("xx", "abcd")
    assert match_in_pieces("xxabcd", ["bc", "abcd"], [3]) == ("xxa", "bc")


def test_include_stop_keeps_the_match_and_nothing_after() -> None:
    assert StopMatcher(["END"], include_stop=True).push("the END of it") == ("the END", "END")


def test_without_stop_strings_everything_comes_out_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_the_largest_set_of_stop_strings_that_is_allowed() -> None:
    rng = random.Random(0)
    stops = ["".join(rng.choice("ab") for _ in range(256)) for _ in range(16)]
    text = "".join(rng.choice("ab") for _ in range(2000))
    matcher, let_out = StopMatcher(stops), ""
    for at in range(0, len(text), 5):
        let_out += matcher.push(text[at : at + 5])[0]
    emitted, match = matcher.push(stops[7] + "tail")
    assert match == stops[7]
    assert let_out + emitted == text


def test_stop_strings_of_several_code_points() -> None:
    assert match_in_pieces("ok 👩‍👩‍👧 done", ["👩‍👧"], [4, 5, 6]) == ("ok 👩‍", "👩‍👧")


def test_a_finished_text_gives_back_what_was_held_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def test_a_stop_string_over_many_pieces() -> None:
    assert match_in_pieces("abcdef", ["bcde"], [1, 2, 3, 4, 5]) == ("a", "bcde")


def test_a_false_beginning_within_a_true_one() -> None:
    """The text held back ends with a shorter beginning of the same stop string."""
    assert match_in_pieces("aab", ["ab"], [1, 2]) == ("a", "ab")
    assert match_in_pieces("abababc", ["ababc"], [1, 2, 3, 4, 5, 6]) == ("ab", "ababc")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_shown_where_they_are_asked_for(name: str, size: int) -> None:
    tokenizer = TOKENIZERS[name]
    special = min(tokenizer.special_ids)
    mark = tokenizer.decode([special], skip_special_tokens=False)
    ids = [special, *tokenizer.encode("the 👍", add_special_tokens=False), special]
    detokenizer = Detokenizer(tokenizer, include_special_tokens=True)
    shown = "".join([detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)])
    shown += detokenizer.finish()
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.count(mark) == 2
