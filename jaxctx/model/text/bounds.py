"""Bounds on the work that a `tokenizer.json` causes, when it is loaded and for every text that it encodes.

The file is data, and yet it decides how much work a text takes: it may have steps that each double their input, or an
expression that tries every way to cut a text into pieces. `refuse_explosive` looks for such things in the file before
the `tokenizers` library loads it; `refuse_slow` then encodes a few short texts. A tokenizer that passes both may still
be a bad one. Called only when a model is loaded.
"""

import base64
import binascii
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from jaxctx.model.config_reader import JSON_BYTES, LIMITS, CheckpointError

# The largest published tokenizer.json takes 33 MB and has 262,145 entries, that of a served family 17 MB and 151,669.
MAX_ENTRIES = LIMITS["vocab_size"]
MAX_ENTRY = 16_384  # characters of one entry; published are some hundred
MAX_STEPS = 64  # of a normalizer, and so on; published are ten
MAX_GROWTH = 1024  # times, in bytes, through all steps of a kind; NFKC, SentencePiece's spaces and bytes as letters: 66
MAX_ADDED = 64  # tokens that a post-processor adds to a text; published is one
MAX_WORD = 1000  # characters of a WordPiece word, of which the time is the square; published is 100
MAX_PATTERN = 4096  # characters of a regular expression; published are 600
MAX_REPEAT = 1000  # of a counted repeat; published is 3
MAX_CHOICES = 10  # repeats one after another that each may match more or less; published are 4
PROBE_LENGTH = 4096  # characters; where time is the third power of the length, this takes minutes
PROBE_S = 15.0  # for all probes together: published tokenizers take a tenth of a second

# The factor by which a step of this type can grow a text in UTF-8. A letter becomes up to 11 (NFKC of U+FDFA), a byte
# two.
GROWTH = {
    "NFKC": 11,
    "NFKD": 11,
    "NFC": 3,
    "NFD": 3,
    "Lowercase": 2,
    "BertNormalizer": 3,
    "ByteLevel": 2,
    "Metaspace": 4,
}
INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# Tokenizers in other forms: of SentencePiece, of Mistral, of tiktoken, and the older one of byte-level BPE.
OTHER_FORMS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")
JsonObject = Mapping[str, Any]


def refuse_explosive(path: Path) -> JsonObject:
    """The content of the file. Raises CheckpointError with the file and the key whose value is too large."""
    if not path.is_file():
        raise CheckpointError(f"{path.name}: {'not a file' if path.exists() else _why_missing(path.parent)}")
    if (size := path.stat().st_size) > JSON_BYTES:
        raise CheckpointError(f"{path.name}: {size:,} bytes, more than {JSON_BYTES:,}")
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not a tokenizer: {error}") from error
    file = _File(path.name)
    if not isinstance(raw, dict):
        file.refuse("", "must be an object")
    _check_model(file, raw.get("model"))
    _check_added_tokens(file, raw.get("added_tokens") or [])
    for kind in INNER:
        _check_steps(file, kind, raw.get(kind))
    return raw


def _why_missing(directory: Path) -> str:
    """What is wrong with a directory without `tokenizer.json`, and what to do."""
    other = next((name for name in OTHER_FORMS if (directory / name).is_file()), None)
    if other is None:
        return "missing; the tokenizer must be in the `tokenizers` format"
    return (
        f"missing, and {other} is not read: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers "
        f"writes it from {other}"
    )


def refuse_slow(backend: tokenizers.Tokenizer, raw: JsonObject, file: str) -> None:
    """Encode probe texts, made of the letters of the tokenizer's own patterns. A sound tokenizer does it quickly.

    Raises CheckpointError, naming the file, if the tokenizer breaks down, makes no token of any text, or takes longer
    than PROBE_S. A thread that still encodes cannot be stopped; it blocks neither the interpreter nor the exit.
    """
    found: list[int] = []
    failed: list[BaseException] = []
    thread = threading.Thread(
        target=_encode_probes, args=(backend, raw, found, failed), name="tokenizer-probe", daemon=True
    )
    thread.start()
    thread.join(PROBE_S)
    if thread.is_alive():
        raise CheckpointError(f"{file}: a text of {PROBE_LENGTH} characters takes it longer than {PROBE_S:g} s")
    if failed:
        raise CheckpointError(f"{file}: breaks down on a text of {PROBE_LENGTH} characters: {failed[0]}") from failed[0]
    if not any(found):
        raise CheckpointError(f"{file}: model.vocab: no entry is of any use: plain texts make no token")


def _encode_probes(
    backend: tokenizers.Tokenizer, raw: JsonObject, found: list[int], failed: list[BaseException]
) -> None:
    """Encode the probes: the number of tokens of each goes to `found`, an error that is a panic to `failed`."""
    for text in _probes(raw):
        try:
            found.append(len(backend.encode_batch_fast([text])[0].ids))
        except Exception:  # it has no entry for some letter: only texts with this letter will fail
            continue
        except BaseException as error:  # a panic of the library
            failed.append(error)
            return


def _probes(raw: JsonObject) -> Iterator[str]:
    """A few sentences, and runs of one character with another at the end, on which bad patterns try everything."""
    yield 'The quick brown fox, aged 42, said: "Grüße!"\n\tdef f(x): return x ** 2  # 日本語 🎉\r\n'
    letters = "a1 \n!é漢"
    for pattern in _patterns(raw):
        letters += "".join(letter for letter in pattern if letter not in "\\[](){}|?*+^$")
    distinct = list(dict.fromkeys(letters))[:32]
    for letter in distinct:
        yield letter * PROBE_LENGTH + "!"
    for first, second in pairwise(distinct):
        yield (first + second) * (PROBE_LENGTH // 2) + "!"


def _patterns(raw: JsonObject) -> Iterator[str]:
    file = _File("")
    for kind in INNER:
        for _, step in _steps(file, kind, raw.get(kind)):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                yield pattern["Regex"]


@dataclass(frozen=True, slots=True)
class _File:
    name: str

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.name}: {key}: {why}" if key else f"{self.name}: {why}")


def _check_model(file: _File, model: Any) -> None:
    if not isinstance(model, dict):
        file.refuse("model", "missing" if model is None else "must be an object")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict | list):
        file.refuse("model.vocab", "missing" if vocab is None else "must be an object or a list")
    if not vocab:
        file.refuse("model.vocab", "empty")
    if len(vocab) > MAX_ENTRIES:
        file.refuse("model.vocab", f"{len(vocab):,} entries, more than {MAX_ENTRIES:,}")
    for entry in vocab:
        text = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(text, str) and len(text) > MAX_ENTRY:
            file.refuse("model.vocab", f"an entry of {len(text):,} characters, more than {MAX_ENTRY:,}: {text[:20]!r}…")
    if model.get("dropout"):
        file.refuse("model.dropout", "is for training: the same text would have other tokens each time")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD:
        file.refuse("model.max_input_chars_per_word", f"{longest:,}, more than {MAX_WORD:,}")


def _check_added_tokens(file: _File, added: Any) -> None:
    if not isinstance(added, list):
        file.refuse("added_tokens", "must be a list")
    if len(added) > MAX_ENTRIES:
        file.refuse("added_tokens", f"{len(added):,} entries, more than {MAX_ENTRIES:,}")
    for token in added:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or len(content) > MAX_ENTRY:
            file.refuse("added_tokens", f"must be tokens with a content of up to {MAX_ENTRY:,} characters")


def _steps(file: _File, kind: str, step: Any) -> Iterator[tuple[str, JsonObject]]:
    """Key and object of each step, those inside of sequences too, in their order."""
    waiting: list[tuple[str, Any]] = [] if step is None else [(kind, step)]
    count = 0
    while waiting:
        key, step = waiting.pop()
        count += 1
        if count > MAX_STEPS:
            file.refuse(kind, f"more than {MAX_STEPS} steps")
        if not isinstance(step, dict):
            file.refuse(key, "must be an object")
        if step.get("type") != "Sequence":
            yield key, step
            continue
        inner = step.get(INNER[kind])
        if not isinstance(inner, list):
            file.refuse(f"{key}.{INNER[kind]}", "must be a list")
        waiting += [(f"{key}.{INNER[kind]}[{i}]", each) for i, each in reversed(list(enumerate(inner)))]


def _check_steps(file: _File, kind: str, step: Any) -> None:
    growth, added = 1.0, 0
    for key, each in _steps(file, kind, step):
        pattern = each.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            _check_pattern(file, f"{key}.pattern.Regex", pattern["Regex"])
        growth *= _growth(file, key, each)
        if growth > MAX_GROWTH:
            file.refuse(key, f"with the steps before it, can make a text more than {MAX_GROWTH:,} times as long")
        if each.get("type") == "TemplateProcessing":
            added += _check_template(file, key, each)
            if added > MAX_ADDED:
                file.refuse(key, f"adds more than {MAX_ADDED} tokens to every text")


def _growth(file: _File, key: str, step: JsonObject) -> float:
    """How many times longer the step can make a text, in bytes."""
    kind = step.get("type")
    if kind == "Precompiled":  # by SentencePiece: a search tree with its size before it, then texts that end in a zero
        try:
            table = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            file.refuse(f"{key}.precompiled_charsmap", f"not base64: {error}")
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max(1, *map(len, texts.split(b"\0")))
    content = next((step[name] for name in ("content", "prepend") if isinstance(step.get(name), str)), "")
    if kind == "Replace":
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(literal, str) and literal:
            return max(1.0, len(content.encode(errors="replace")) / len(literal.encode(errors="replace")))
        return 1 + len(content.encode(errors="replace"))  # between all characters, where it matches nothing
    if kind == "Prepend":
        return 1 + len(content.encode(errors="replace"))  # of an empty text, or one of a letter
    return GROWTH.get(str(kind), 1)


def _check_template(file: _File, key: str, step: JsonObject) -> int:
    """How many tokens the template adds to a single text."""
    pieces, tokens = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(tokens, dict):
        file.refuse(f"{key}.single", "must be a list, and special_tokens an object")
    if sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces) > 1:
        file.refuse(f"{key}.single", "must hold the text once")
    added = 0
    for piece in pieces:
        name = piece["SpecialToken"].get("id") if isinstance(piece, dict) and "SpecialToken" in piece else None
        token = tokens.get(name) if isinstance(name, str) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        added += len(ids) if isinstance(ids, list) else 0
    return added


def _check_pattern(file: _File, key: str, pattern: str) -> None:
    """Refuse a regular expression that may take a time exponential in the text's length, or in its own.

    The library backtracks: it tries all ways of matching until one fits. There are exponentially many only where
    something is repeated that can itself match in several ways, or where many repeats follow each other. Whatever
    cannot be seen to be none of these is refused too; no published tokenizer has such a pattern.
    """
    if len(pattern) > MAX_PATTERN:
        file.refuse(key, f"{len(pattern):,} characters, more than {MAX_PATTERN:,}")
    try:
        parsed = _Pattern(pattern).parse()
    except _Refused as error:
        file.refuse(key, f"{error} at character {error.position} of {pattern[:80]!r}{'…' * (len(pattern) > 80)}")
    if parsed.choices > MAX_CHOICES:
        file.refuse(key, f"{parsed.choices} repeats one after another, more than {MAX_CHOICES}")


class _Refused(Exception):
    def __init__(self, why: str, position: int) -> None:
        super().__init__(why)
        self.position = position


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pattern: how much it gives a backtracking matcher to try."""

    choices: int = 0  # of repeats that may match more or less, and of alternatives, one after another
    copies: int = 1  # characters that it unfolds to where repeats are counted
    first: str | None = None  # the character that it begins with, where that is certain


class _Pattern:
    """Reads the syntax of Oniguruma, as far as is needed to know what is repeated."""

    OPTIONS = frozenset("imsadu-")  # not x: comments in patterns

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> _Part:
        whole = self.alternatives(0)
        if self.at < len(self.text):
            raise _Refused("unbalanced parenthesis", self.at)
        return whole

    def alternatives(self, depth: int) -> _Part:
        if depth > 50:
            raise _Refused("more than 50 groups inside each other", self.at)
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            branches.append(self.sequence(depth))
        if len(branches) == 1:
            return branches[0]
        firsts = [branch.first for branch in branches]
        certain = None not in firsts and len(set(firsts)) == len(firsts)  # the next character decides which it is
        choices = max(branch.choices for branch in branches) + (0 if certain else 1)
        return _Part(choices, sum(branch.copies for branch in branches))

    def sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(depth))
        first = parts[0].first if parts else None
        return _Part(sum(part.choices for part in parts), sum(part.copies for part in parts) or 1, first)

    def repeated(self, depth: int) -> _Part:
        part, start = self.atom(depth), self.at
        ambiguous = fails = False
        while (bounds := self.repeat()) is not None:
            least, most, possessive = bounds
            ambiguous |= (most is None or most > 1) and part.choices > 0
            fails |= ambiguous and least > 1  # so that it may fail itself, for want of more
            times = max(1, most or least)
            copies = part.copies * times
            if times > 1 and copies > MAX_REPEAT:
                raise _Refused(f"repeats more than {MAX_REPEAT} times", start)
            choices = part.choices + (0 if possessive or least == most else 1)
            part = _Part(choices, copies, part.first if least else None)
        last = depth == 0 and self.peek() in ("", "|")  # it has matched, and nothing makes it try otherwise
        if ambiguous and (fails or not last):
            raise _Refused("repeats what can itself match in several ways", start)
        return part

    def repeat(self) -> tuple[int, int | None, bool] | None:
        """Bounds of a repeat, None for as often as it goes, and whether it never gives back; None if there is none."""
        mark = self.peek()
        simple = {"?": (0, 1), "*": (0, None), "+": (1, None)}
        if mark and mark in simple:
            self.at += 1
            follows = self.peek()
            if follows and follows in "?+":
                self.at += 1
            return *simple[mark], follows == "+"
        end = self.text.find("}", self.at)
        if mark != "{" or end < 0:
            return None
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        if not (low or high) or not all(each == "" or (each.isascii() and each.isdigit()) for each in (low, high)):
            return None  # a brace as a character
        if len(low) > 9 or len(high) > 9:
            raise _Refused(f"repeats more than {MAX_REPEAT} times", self.at)
        self.at = end + 1
        if self.peek() == "?":
            self.at += 1
        least = int(low or 0)
        return least, (int(high) if high else None) if comma else least, False

    def atom(self, depth: int) -> _Part:
        start, mark = self.at, self.text[self.at]
        self.at += 1
        if mark == "(":
            return self.group(depth, start)
        if mark == "[":
            self.characters()
            return _Part()
        if mark == "\\":
            return self.escape(start)
        return _Part(first=None if mark in ".^$" else mark)

    def group(self, depth: int, start: int) -> _Part:
        rest = self.text[self.at :]
        closed = False  # once it has matched, in one way
        if rest.startswith("*"):
            raise _Refused("a callout", start)
        if rest.startswith("?"):
            if rest.startswith("?#"):
                self.at = self.text.find(")", start) + 1 or len(self.text)
                return _Part(copies=0)
            heads = ("?:", "?=", "?!", "?<=", "?<!", "?>")
            head = next((each for each in heads if rest.startswith(each)), None)
            if head is not None:
                self.at += len(head)
                closed = head != "?:"
            elif rest[1:2] in ("<", "'"):
                self.at = self.text.find(">" if rest[1] == "<" else "'", self.at + 2) + 1 or len(self.text)
            else:
                options = rest[1:].partition(")")[0].partition(":")[0]
                if not options or not set(options) <= self.OPTIONS:
                    raise _Refused(f"a group of the kind {rest[:2]!r}", start)
                self.at += 1 + len(options)
                if self.peek() == ")":  # options from here to the end of what is around
                    self.at += 1
                    return self.alternatives(depth + 1)
                self.at += 1
        inner = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise _Refused("unbalanced parenthesis", start)
        self.at += 1
        return _Part(copies=inner.copies) if closed else inner

    def escape(self, start: int) -> _Part:
        letter = self.peek()
        if not letter:
            raise _Refused("a backslash at the end", start)
        if letter in "123456789kg":
            raise _Refused("refers to another group", start)
        self.at += 1
        if letter in "pPxoN" and self.peek() == "{":
            self.at = self.text.find("}", self.at) + 1 or len(self.text)
        return _Part(first=None if letter.isalnum() else letter)

    def characters(self) -> None:
        """Skip a class of characters, whose opening bracket has been read."""
        start, depth = self.at - 1, 1
        begins = True
        while depth:
            if self.at >= len(self.text):
                raise _Refused("unbalanced bracket", start)
            letter = self.text[self.at]
            self.at += 1
            if begins and letter == "^":
                continue
            if letter == "\\":
                self.at += 1
            elif letter == "[":
                end = self.text.find(":]", self.at)
                if self.peek() == ":" and end >= 0:
                    self.at = end + 2
                else:
                    depth += 1
                    begins = True
                    continue
            elif letter == "]" and not begins:
                depth -= 1
            begins = False

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]
