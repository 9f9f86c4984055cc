"""Grammars of calls by llguidance's own matcher: what they let through."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import decoders, models, pre_tokenizers

from jaxctx.model.bundled import BUNDLED


def with_marks(*marks: str, end: str = "<|end|>") -> tuple[LLTokenizer, dict[str, int]]:
    """A tokenizer of bytes that has these marks as special tokens, and their ids. `end`: what ends outputs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [end, *alphabet]
    backend = tokenizers.Tokenizer(models.BPE({entry: place for place, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(each, special=True, normalized=False) for each in (end, *marks)]
    backend.add_special_tokens(special)
    ids = {mark: backend.token_to_id(mark) for mark in marks}
    return LLTokenizer(backend.to_str(), eos_token=0), ids


PLAIN = LLTokenizer(Path(BUNDLED / "tokenizer.json").read_text("utf-8")), dict[str, int]()


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a whole output with this text fits the grammar."""
    assert LLMatcher.validate_grammar(grammar, tokenizer) == ""
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    taken = matcher.try_consume_tokens(tokens)
    assert not matcher.is_error(), matcher.get_error()
    return taken == len(tokens) and matcher.is_accepting()


def elements(arguments: str) -> str:
    """An object as elements; anything else as it is."""
    value = json.loads(arguments)
    if not isinstance(value, dict):
        return arguments
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in value.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


def draw(tokenizer: LLTokenizer, grammar: str, seed: int, most: int = 400, pieces: Sequence[str] = ()) -> str | None:
    """The text of random tokens that the masks let through; None if it is too long. `pieces`: are often chosen where
    they fit, as random tokens rarely make a mark.
    """
    tokens_of_pieces = [tokenizer.tokenize_str(piece) for piece in pieces]
    chooser, matcher = random.Random(seed), LLMatcher(tokenizer, grammar)
    mask = allocate_token_bitmask(1, tokenizer.vocab_size)
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < most:
        fitting = [piece for piece in tokens_of_pieces if matcher.validate_tokens(piece) == len(piece)]
        if fitting and chooser.random() < 0.8:
            piece = chooser.choice(fitting)
            assert matcher.consume_tokens(piece), matcher.get_error()
            tokens += piece
            continue
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        # What ends a string, a list or the output is chosen often, so that outputs are short.
        ends = [int(token) for token in allowed if tokenizer.decode_str([int(token)]) in ('"', "]", "}")]
        token = tokenizer.eos_token if tokenizer.eos_token in allowed and chooser.random() < 0.5 else None
        if token is None:
            token = chooser.choice(ends) if ends and chooser.random() < 0.4 else int(chooser.choice(list(allowed)))
        assert matcher.consume_token(token), matcher.get_error()
        if token == tokenizer.eos_token:
            break
        tokens.append(token)
    assert not matcher.is_error()
    return tokenizer.decode_str(tokens) if len(tokens) < most else None
