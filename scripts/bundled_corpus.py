"""What the bundled model learns from and is measured against: the standard library's sources, and two n-gram models.

Everything is a function of the Python installation: files in sorted order, hold-out chosen by a hash of the file name.
The sources are under the PSF licence. Called by `train_bundled.py`; does not know the neural model.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Ids = npt.NDArray[np.int64]

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tests repeat themselves, and tables of character sets and generated help are not code anyone would write.
SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data"})
HOLD_OUT = 20  # one file of so many


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts by file, the hold-out apart."""

    training: list[str]
    validation: list[str]


def standard_library() -> Corpus:
    """Every `.py` of this Python's standard library that is UTF-8 and not skipped, in order of its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts) or name.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") % HOLD_OUT == 0
        (corpus.validation if held_out else corpus.training).append(text)
    return corpus


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: every string can be encoded and every id is bytes or a special token.

    A prompt begins as a file does, with the end of the one before: so its first words are not words out of nowhere.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Ids:
    """All texts in one row, each begun by the end-of-text token that ends the one before."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([end, *one.ids], np.int64) for one in encoded])


def split_spaces(tokenizer: Tokenizer, ids: Ids, rate: float, rng: np.random.Generator) -> Ids:
    """Cut some words from the space before them, as the end of a prompt does: "def " is not the beginning of " name".

    A fraction `rate` of the tokens that are a space and a word become two; white space before takes the space in.
    """
    text = [tokenizer.id_to_token(i) or "" for i in range(VOCAB_SIZE)]
    ids_of = {token: i for i, token in enumerate(text)}
    space = "Ġ"  # as byte-level BPE writes it
    word = np.array([ids_of.get(t[1:], -1) if t[0] == space and t[1:2] not in ("", space) else -1 for t in text])
    wider = np.array([ids_of.get(t + space, -1) if set(t) <= {space, "Ċ"} else -1 for t in text])

    cut = (word[ids] >= 0) & (rng.random(len(ids)) < rate)
    cut[0] = False
    previous = np.roll(ids, 1)
    taken_in = cut & (wider[previous] >= 0)
    words = np.where(cut, word[ids], ids)
    words = np.where(np.roll(taken_in, -1), wider[ids], words)
    apart = np.flatnonzero(cut & ~taken_in)
    return np.insert(words, apart, ids_of[space])


def unigram_loss(training: Ids, validation: Ids) -> float:
    """Nats per token of the training frequencies, each count one higher."""
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1.0
    return float(-np.log(counts / counts.sum())[validation[1:]].mean())


def trigram_loss(training: Ids, validation: Ids, discount: float = 0.75) -> float:
    """Nats per token of an interpolated Kneser–Ney trigram model (Kneser and Ney, 1995), one discount for all orders.

    Higher order: counts of trigrams. Lower orders: in how many different contexts an n-gram was seen.
    """
    trigrams = np.unique(_key(training, 3), return_counts=True)
    bigrams = np.unique(trigrams[0] % VOCAB_SIZE**2, return_counts=True)  # by how many tokens precede them
    unigrams = np.bincount(bigrams[0] % VOCAB_SIZE, minlength=VOCAB_SIZE)

    uniform = 1 / VOCAB_SIZE
    total = unigrams.sum()
    lowest = (np.maximum(unigrams - discount, 0) + discount * (unigrams > 0).sum() * uniform) / total
    middle = _Discounted(*bigrams, discount)
    highest = _Discounted(*trigrams, discount)
    pairs, triples = _key(validation, 2)[1:], _key(validation, 3)
    p = highest.interpolate(triples, middle.interpolate(pairs, lowest[validation[2:]]))
    return float(-np.log(p).mean())


def _key(ids: Ids, order: int) -> Ids:
    """Each n-gram as one number, the latest token least significant."""
    keys = np.zeros(len(ids) - order + 1, np.int64)
    for i in range(order):
        keys = keys * VOCAB_SIZE + ids[i : len(ids) - order + 1 + i]
    return keys


class _Discounted:
    """One order of Kneser–Ney: counts of n-grams, and per context their sum and how many there are."""

    def __init__(self, grams: Ids, counts: Ids, discount: float) -> None:
        self.grams, self.counts, self.discount = grams, counts, discount
        self.contexts, first = np.unique(grams // VOCAB_SIZE, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        self.kinds = np.diff(np.append(first, len(grams)))

    def interpolate(self, keys: Ids, lower: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Probability of each n-gram's last token; a context never seen leaves it to the lower order."""
        counts = _look_up(self.grams, self.counts, keys)
        totals = _look_up(self.contexts, self.totals, keys // VOCAB_SIZE)
        kinds = _look_up(self.contexts, self.kinds, keys // VOCAB_SIZE)
        own = np.maximum(counts - self.discount, 0) + self.discount * kinds * lower
        return np.where(totals > 0, own / np.maximum(totals, 1), lower)


def _look_up(sorted_keys: Ids, values: Ids, wanted: Ids) -> Ids:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == wanted, values[at], 0)
