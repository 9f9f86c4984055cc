"""Tokenizer: text to ids and back, by the Hugging Face `tokenizers` library and the model's `tokenizer.json`."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers import models, pre_tokenizers

from jaxctx.model.config import CheckpointError

# Pre-tokenizers, type and behaviour, that lose no byte of a text.
BYTE_LEVEL = ("ByteLevel", None)
SPLITS = {("Split", how) for how in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")}
KEEPING = {BYTE_LEVEL, ("Digits", None), *SPLITS}


class Tokenizer:
    """Immutable after construction; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Takes the backend over: its truncation and padding, meant for training, are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Raises CheckpointError, naming the file, if it is missing or not a tokenizer."""
        if not path.is_file():
            raise CheckpointError(f"{path.name}: missing; the tokenizer must be in the `tokenizers` format")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path.name}: not a tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of any text.

        `add_special_tokens` adds what the model's own post-processor adds (for many models a begin-of-sequence token):
        wanted for plain prompts, not after a chat template nor when continuing a context. As in vLLM's completions, the
        text of a special token stands for that token.
        """
        # A batch, because `encode` holds the interpreter: for 1.5 s with a text of 2 MB, in which no step is prepared.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Ids that the vocabulary lacks have no text: many models have more rows than their tokenizer has entries.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

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
