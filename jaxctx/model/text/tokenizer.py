"""Tokenizer: text to ids and back, by the Hugging Face `tokenizers` library and the model's `tokenizer.json`."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers import models, pre_tokenizers

from jaxctx.errors import InvalidArgument
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text.bounds import refuse_explosive, refuse_slow

# Pre-tokenizers, type and behaviour, that lose no byte of a text.
BYTE_LEVEL = ("ByteLevel", None)
SPLITS = {("Split", how) for how in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")}
KEEPING = {BYTE_LEVEL, ("Digits", None), *SPLITS}


@contextmanager
def library_errors(kind: type[InvalidArgument], what: str) -> Iterator[None]:
    """Raise `kind` for what the library raises: bare Exception, and where it panics something that is not even that."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 has it under no name that can be imported
            raise
        raise kind(f"{what}: {error}") from error


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a `tokenizer.json`.

    Raises CheckpointError, naming the file and the key, if it is missing, not a tokenizer, empty, or one that would
    take a time or a memory beyond all proportion to a text.
    """
    raw = refuse_explosive(path)
    with library_errors(CheckpointError, f"{path.name}: not a tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    refuse_slow(backend, raw, path.name)
    return backend


def byte_of_letter() -> dict[str, int]:
    """The byte that each letter of an entry of byte-level BPE stands for (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = byte_of_letter()
BYTE_ENTRY = re.compile("<0x[0-9A-F]{2}>")  # an entry of SentencePiece that is one byte
WORD_START = "\u2581"  # stands for a space in entries of SentencePiece


def decoder_json(backend: tokenizers.Tokenizer) -> str:
    """How the library writes the decoder of a tokenizer, without spaces."""
    return json.dumps(json.loads(backend.to_str())["decoder"], separators=(",", ":"))


class Tokenizer:
    """Immutable after construction; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Takes the backend over: its truncation and padding, meant for training, are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._is_byte_level = '"type":"ByteLevel"' in decoder_json(backend)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Raises CheckpointError as `read_backend` does."""
        return cls(read_backend(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of any text.

        `add_special_tokens` adds what the model's own post-processor adds (for many models a begin-of-sequence token):
        wanted for plain prompts, not after a chat template nor when continuing a context. As in vLLM's completions, the
        text of a special token stands for that token. Raises InvalidArgument for a text that it cannot read: one with
        letters that the vocabulary lacks, or on which a pattern of the tokenizer gives up.
        """
        # A batch, because `encode` holds the interpreter: for 1.5 s with a text of 2 MB, in which no step is prepared.
        with library_errors(InvalidArgument, "the model's tokenizer cannot read the text"):
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Ids that the vocabulary lacks have no text: many models have more rows than their tokenizer has entries.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def entries(self, ids: Sequence[int]) -> list[str]:
        """The entry of the vocabulary that each id is, as it is written there; "" for ids that it lacks."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def piece(self, token: int) -> bytes:
        """What a token adds to the middle of a text, in UTF-8: of some tokens only a part of a character.

        b"" for ids that the vocabulary lacks.
        """
        entry = self._backend.id_to_token(token)
        if entry is None:
            return b""
        if token in self._added_ids:
            return (entry if self._is_byte_level else entry.replace(WORD_START, " ")).encode()
        if self._is_byte_level:
            return bytes(BYTE_OF_LETTER[letter] for letter in entry if letter in BYTE_OF_LETTER)
        if BYTE_ENTRY.fullmatch(entry):
            return bytes([int(entry[3:5], 16)])
        if entry.startswith(WORD_START):  # at the start of a text, the decoder would drop the space
            return entry.replace(WORD_START, " ").encode()
        return self._backend.decode([token], skip_special_tokens=False).encode()

    def to_json(self) -> str:
        """What `tokenizer.json` would say of it, added tokens included."""
        return self._backend.to_str()

    def vocabulary(self) -> dict[int, str]:
        """The entry of every id that has one, added ones included."""
        return {token: entry for entry, token in self._backend.get_vocab(with_added_tokens=True).items()}

    def largest_id(self) -> tuple[int, str]:
        """The largest id of the vocabulary, and its entry."""
        entry, token = max(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return token, entry

    def token_id(self, token: str) -> int | None:
        """Id of the exact entry of the vocabulary, None if there is none."""
        return self._backend.token_to_id(token)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """A text of b bytes in UTF-8 has at least b divided by this tokens. None where nothing is certain.

        It is for byte-level BPE as it comes: with all bytes in the vocabulary, and no step that shortens a text
        (normalizer, pre-tokenizer that removes, added tokens that swallow the space around them).
        """
        if self._backend.normalizer is not None or not isinstance(self._backend.model, models.BPE):
            return None
        steps = json.loads(self._backend.to_str())["pre_tokenizer"] or {}
        kinds = {(each.get("type"), each.get("behavior")) for each in steps.get("pretokenizers", [steps])}
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        added = self._backend.get_added_tokens_decoder().values()
        every_byte = BYTE_LEVEL in kinds and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        if not kinds <= KEEPING or not every_byte or any(token.lstrip or token.rstrip for token in added):
            return None
        # A letter of an entry is a byte of the text; added tokens are found in the text as they are written.
        return max(*map(len, vocabulary), *(len(token.content.encode()) for token in added))
