"""Tokens that stand beside `tokenizer.json`: what `tokenizer_config.json` and its forerunners add to a tokenizer.

The same tokens in the same order as in transformers 5, which adds them when it opens a directory, so that a text has
the same ids here and there. With `added_tokens_decoder` in `tokenizer_config.json` that file says everything; without
it the older `special_tokens_map.json` and `added_tokens.json` are read too.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

from jaxctx.model.config_reader import CheckpointError, Reader
from jaxctx.model.text.tokenizer import library_errors

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_TOKEN = 16_384  # characters


def named_tokens(settings: Reader, older: Reader) -> dict[str, tokenizers.AddedToken]:
    """Special tokens by their names, "bos_token" and others that end in "_token". The older file goes first if read.

    Raises CheckpointError for one that is neither a string nor an object with `content`.
    """
    found: dict[str, tokenizers.AddedToken] = {}
    for reader in (settings, older):
        others = [name for name in reader.raw if name.endswith("_token") and name not in NAMES]
        for name in [*NAMES, *others]:
            value = reader.get(name)
            if value is not None and (name in NAMES or isinstance(value, str | dict)):  # add_bos_token is a flag
                found[name] = _token(reader, name, value, special=True)
    return {name: found[name] for name in sorted(found, key=lambda name: name not in NAMES)}


def add_tokens(
    backend: tokenizers.Tokenizer,
    named: Mapping[str, tokenizers.AddedToken],
    settings: Reader,
    older: Reader,
    oldest: Reader,
    *,
    vocab_size: int | None,
) -> None:
    """Add to the tokenizer what its `tokenizer.json` lacks or has with other flags.

    `older` is special_tokens_map.json and `oldest` added_tokens.json, empty where they are not to be read. Special
    tokens that are only named, and for which a model of `vocab_size` ids (None: unknown) has none left, stay out:
    nothing could make of them what the model knows.
    Raises CheckpointError for a token that is malformed, or would get another id than the file says.
    """
    declared = _declared(settings, named, oldest)
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    adding = [token for _, token in sorted(declared.items()) if repr(token) not in known]
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    texts |= {token.content for token in adding}
    names = {token.content for token in named.values()}
    for token in adding:
        token.special = token.special or token.content in names
    backend.add_tokens(adding)
    for number, token in declared.items():
        if (got := backend.token_to_id(token.content)) != number:
            reader, key = (settings, f"added_tokens_decoder.{number}") if not oldest.raw else (oldest, token.content)
            reader.refuse(key, f"{token.content!r} is to have id {number}, but in tokenizer.json it has {got}")
    for token in [*named.values(), *_unnamed(settings), *_unnamed(older)]:
        if token.content in texts:
            continue
        texts.add(token.content)
        free = backend.get_vocab_size(with_added_tokens=True)  # the id that a new token would get
        if backend.token_to_id(token.content) is not None or (vocab_size is not None and free < vocab_size):
            backend.add_tokens([token])


def without_tokens_beyond(
    backend: tokenizers.Tokenizer, vocab_size: int, *, keep: Collection[str]
) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens that a model of `vocab_size` ids has no row for, but those in `keep`.

    Published: the token of an image where all sizes of a model share a tokenizer and the smallest reads text alone.
    Its text is plain text then; transformers would make an id of it that the model fails on.
    Raises CheckpointError if the vocabulary cannot be without one: where merges of its own make it.
    """
    added = backend.get_added_tokens_decoder()
    beyond = {token.content for number, token in added.items() if number >= vocab_size} - set(keep)
    if not beyond:
        return backend
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in beyond]
    vocabulary = raw["model"]["vocab"]
    if isinstance(vocabulary, dict):  # else of Unigram, where a place in a list is an id
        raw["model"]["vocab"] = {entry: number for entry, number in vocabulary.items() if entry not in beyond}
    what = f"tokenizer.json: it needs {min(beyond)[:80]!r}, but config.json: vocab_size is {vocab_size}"
    with library_errors(CheckpointError, what):
        return tokenizers.Tokenizer.from_str(json.dumps(raw))


def _declared(
    settings: Reader, named: Mapping[str, tokenizers.AddedToken], oldest: Reader
) -> dict[int, tokenizers.AddedToken]:
    """Added tokens by their ids."""
    found: dict[int, tokenizers.AddedToken] = {}
    inner = settings.inner("added_tokens_decoder")
    for key, value in inner.raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            inner.refuse(key[:80], "must be a token id")
        if not isinstance(value, dict):
            inner.refuse(key, "must be an object with content")
        found[int(key)] = _token(inner, key, value, special=False)
    names = {token.content for token in named.values()}
    for text, number in oldest.raw.items():
        if type(number) is not int or not 0 <= number < 2**31 or not 0 < len(text) <= MAX_TOKEN:
            oldest.refuse(text[:80], f"must be a token id, not {str(number)[:80]}")
        special = text in names
        found[number] = tokenizers.AddedToken(text, normalized=not special, special=special)
    return found


def _unnamed(reader: Reader) -> list[tokenizers.AddedToken]:
    """Special tokens without names; in some files they have names, under the same key."""
    found: list[tokenizers.AddedToken] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        values = reader.get(key) or []
        if isinstance(values, dict):
            values = list(values.values())
        if not isinstance(values, list):
            reader.refuse(key, "must be a list of tokens")
        found += [_token(reader, key, value, special=True) for value in values]
        if found:
            break  # the second is the older name of the first
    return found


def _token(reader: Reader, key: str, value: Any, *, special: bool) -> tokenizers.AddedToken:
    """A token, written as a string or as an object with `content` and flags."""
    flags = value if isinstance(value, dict) else {"content": value}
    content = flags.get("content")
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN:
        reader.refuse(key, f"must be a string, or an object with content, of up to {MAX_TOKEN:,} characters")
    said = {flag: flags[flag] for flag in _FLAGS if flags.get(flag) is not None}
    if not all(isinstance(flag, bool) for flag in said.values()):
        reader.refuse(key, "single_word, lstrip, rstrip, normalized and special must be true or false")
    return tokenizers.AddedToken(content, **({"special": special} | said))
