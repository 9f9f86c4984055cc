"""TokenRules: which tokens may come next by `allowed_token_ids` and `bad_words`, which need no grammar.

A bad word is the tokens that its text has by itself, and those that it has with a space before it if that is only
another way to write its first one: as vLLM has it. Its last token is forbidden where an output ends with those before
it; a word of one token is forbidden everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxctx.model.sampling import allowed_words
from jaxctx.model.text import ModelText
from jaxctx.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of one request."""

    allowed: Int32[np.ndarray, " words"]  # tokens that may come anywhere
    bad_words: Sequence[tuple[tuple[int, ...], int]] = ()  # of several tokens: those before the last one, and that

    @property
    def history(self) -> int:
        """How many of an output's last tokens decide what may come next."""
        return max((len(before) for before, _ in self.bad_words), default=0)

    def allowed_after(self, last: Iterable[int]) -> Int32[np.ndarray, " words"]:
        """The tokens that may come behind an output. `last`: its last `history` tokens, or all if it has fewer."""
        if not self.bad_words:
            return self.allowed
        tokens = tuple(last)
        ends = [end for before, end in self.bad_words if tokens[-len(before) :] == before]
        return self.allowed & ~token_bits(ends, len(self.allowed)) if ends else self.allowed


def has_token_rules(request: GenerateRequest) -> bool:
    """Whether a request says which tokens may be drawn."""
    return bool(request.sampling.allowed_token_ids or request.sampling.bad_words)


def make_token_rules(request: GenerateRequest, text: ModelText, vocab_size: int) -> TokenRules:
    """The rules of a request for a model. Ids beyond the vocabulary are left out."""
    words, sampling = allowed_words(vocab_size), request.sampling
    if sampling.allowed_token_ids:
        ends = () if request.output_format is None else text.eos_ids  # else no text that is complete could end
        allowed = token_bits([*sampling.allowed_token_ids, *ends], words)
    else:
        allowed = np.packbits(np.arange(32 * words) < vocab_size, bitorder="little").view(np.int32)
    sequences = dict.fromkeys(tokens for word in sampling.bad_words for tokens in bad_token_sequences(word, text))
    forbidden = token_bits([tokens[0] for tokens in sequences if len(tokens) == 1], words)
    longer = [(tokens[:-1], tokens[-1]) for tokens in sequences if len(tokens) > 1]
    return TokenRules(allowed & ~forbidden, longer)


def bad_token_sequences(word: str, text: ModelText) -> list[tuple[int, ...]]:
    """The tokens of a bad word: by itself, and behind a space if that changes nothing but its first token."""
    bare = word.lstrip()
    alone = tuple(text.tokenizer.encode(bare, add_special_tokens=False))
    if not alone:
        return []
    spaced = tuple(text.tokenizer.encode(f" {bare}", add_special_tokens=False))
    is_other = len(spaced) == len(alone) and spaced[0] != alone[0]
    return [alone, spaced] if is_other else [alone]


def token_bits(tokens: Iterable[int], words: int) -> Int32[np.ndarray, " words"]:
    """A mask of `words` words with the bits of these tokens; ids beyond it are left out."""
    bits = np.zeros(32 * words, np.bool_)
    bits[[token for token in tokens if 0 <= token < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
