"""Default sizes: the page, the requests at once and the rows of a step where no setting gives them.

    platform    page size              requests at once    rows of a step
    CPU         16 tokens              32                  512
    GPU         64 tokens              256                 2,048
    TPU         128 tokens             256                 2,048

Page sizes are such as the platform's kernel for attention reads. On an accelerator requests and rows are halved while
too little memory would be left for the KV of that many requests: what is remembered of each for sampling takes 11 bytes
for every entry of the vocabulary, and temporaries grow with the rows of a step. A size that a setting gives is never
changed; the others adapt to it.

Arithmetic only: nothing here asks for a device, allocates or compiles. Called by the server's engine builder, which
has the compilers measure what this module proposes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxctx.engine.config import page_bytes, sizes_in_words
from jaxctx.errors import InvalidArgument
from jaxctx.model.interface import KVSpec
from jaxctx.model.sampling import slot_state_bytes

TOKENS_FOR_EACH = 256  # of KV for each of the requests at once: 256 requests have 16 contexts of 4,096 tokens
LEAST_MAX_BATCH = 16  # halving ends here: a step of fewer rows takes as long
LEAST_MAX_BATCH_TOKENS = 512  # and here: prompts in smaller pieces would read the weights more often than needed
MOVING_TOKENS = 512  # of KV that an accelerator moves beside a step, if that is more than two pages


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an engine that depend on its platform, and where they come from."""

    page_size: int  # tokens
    max_batch: int  # requests at once
    max_batch_tokens: int  # rows of a step
    moving_pages: int  # that are moved beside a step of others
    reason: str  # in words: "defaults of this GPU"

    @property
    def in_words(self) -> str:
        """The three sizes that settings may give, and where they come from."""
        return sizes_in_words(self.page_size, self.max_batch, self.max_batch_tokens, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSettings:
    """The sizes that settings give. None: the platform's."""

    page_size: int | None = None
    max_batch: int | None = None
    max_batch_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What is known of a model and the memory it is to run in before anything is compiled."""

    memory_bytes: int  # that a process gets of all devices
    weights_bytes: int  # on all devices
    devices: int = 1  # each remembers all running requests
    page_holders: int = 1  # devices that hold each part of a page
    page_parts: int = 1  # over which its KV heads are split
    platform: str = "cpu"  # "cpu", "gpu" or "tpu"
    vocab_size: int
    kv: KVSpec
    longest: int  # tokens of the longest context
    share: float  # of what is left, for KV
    kv_tokens: int | None = None  # that a setting asks for; None: as many as fit
    draft_bytes: int = 0  # that a draft model takes, all of it

    def sampling_bytes(self, max_batch: int) -> int:
        """What is remembered of running requests, on all devices."""
        return self.devices * slot_state_bytes(max_batch, self.vocab_size)

    def left_bytes(self, max_batch: int) -> int:
        """What weights, running requests and a draft model leave, before temporaries and code; below zero if they do
        not fit.
        """
        return self.memory_bytes - self.weights_bytes - self.draft_bytes - self.sampling_bytes(max_batch)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, on all devices."""
        return self.page_holders * page_bytes(self.kv, page_size, self.platform, self.page_parts)

    def most_kv_tokens(self, sizes: Sizes) -> int:
        """An upper bound of the tokens of KV that fit beside these sizes; temporaries and code will take from it."""
        pages = int(self.left_bytes(sizes.max_batch) * self.share) // self.page_bytes(sizes.page_size)
        return max(0, pages) * sizes.page_size

    def least_kv_tokens(self, sizes: Sizes) -> int:
        """Tokens of KV below which these sizes are too large: those of the setting, else some for each request."""
        if self.kv_tokens is not None:
            return self.kv_tokens
        return sizes.max_batch * min(TOKENS_FOR_EACH, self.longest)


def default_page_size(platform: str) -> int:
    """Tokens of a page on "cpu", "gpu" or "tpu"."""
    if platform == "cpu":
        return 16
    return 128 if platform == "tpu" else 64


def sizes_to_try(platform: str, settings: SizeSettings, memory: ModelMemory) -> tuple[Sizes, ...]:
    """Sizes for an engine on "cpu", "gpu" or "tpu", the largest first; there is at least one.

    The first are those to take, unless a compiler finds that they leave less than `memory.least_kv_tokens`: then the
    next ones, and so on; the last ones in any case. A CPU has one choice. Sizes that leave too little for certain are
    not among them.

    Raises InvalidArgument naming `max_batch` where a setting asks for more requests than there is memory to remember.
    """
    _check_max_batch(platform, settings, memory)
    page_size = settings.page_size or default_page_size(platform)
    choices = _choices(platform, settings)
    tried = [
        Sizes(
            page_size=page_size,
            max_batch=max_batch,
            max_batch_tokens=max_batch_tokens,
            moving_pages=2 if platform == "cpu" else max(2, MOVING_TOKENS // page_size),  # more would slow the steps
            reason=_reason(platform, settings, is_smaller=(max_batch, max_batch_tokens) != choices[0]),
        )
        for max_batch, max_batch_tokens in choices
    ]
    may_fit = [sizes for sizes in tried[:-1] if memory.most_kv_tokens(sizes) >= memory.least_kv_tokens(sizes)]
    return (*may_fit, tried[-1])


def _check_max_batch(platform: str, settings: SizeSettings, memory: ModelMemory) -> None:
    """Raise InvalidArgument if the requests of a setting can surely not be remembered, though the weights fit."""
    free = memory.memory_bytes - memory.weights_bytes - memory.draft_bytes
    if platform == "cpu" or settings.max_batch is None or free <= 0 or memory.left_bytes(settings.max_batch) > 0:
        return
    needed = memory.sampling_bytes(settings.max_batch) >> 20
    raise InvalidArgument.field(
        "max_batch",
        f"what sampling remembers of {settings.max_batch:,} requests takes {needed:,} MiB, and the weights leave "
        f"{free >> 20:,} MiB",
    )


def _choices(platform: str, settings: SizeSettings) -> list[tuple[int, int]]:
    """Requests at once and rows of a step, the largest first. Rows are at least as many as requests."""
    if platform == "cpu":
        return [_with_settings(32, 512, settings)]
    pairs = [(256, 2048)]
    while pairs[-1] != (LEAST_MAX_BATCH, LEAST_MAX_BATCH_TOKENS):
        max_batch, max_batch_tokens = pairs[-1]
        pairs.append((max(max_batch // 2, LEAST_MAX_BATCH), max(max_batch_tokens // 2, LEAST_MAX_BATCH_TOKENS)))
    choices = [_with_settings(*pair, settings) for pair in pairs]
    return list(dict.fromkeys(choices))  # several are the same where settings give both


def _with_settings(max_batch: int, max_batch_tokens: int, settings: SizeSettings) -> tuple[int, int]:
    """Requests and rows with those of the settings in their place; what they do not give follows what they give."""
    if settings.max_batch is not None and settings.max_batch_tokens is not None:
        return settings.max_batch, settings.max_batch_tokens
    if settings.max_batch is not None:
        return settings.max_batch, max(max_batch_tokens, settings.max_batch)
    if settings.max_batch_tokens is not None:
        return min(max_batch, settings.max_batch_tokens), settings.max_batch_tokens
    return max_batch, max_batch_tokens


def _reason(platform: str, settings: SizeSettings, *, is_smaller: bool) -> str:
    """Where sizes come from: "page size as set, the rest defaults of this GPU"."""
    by_name: Mapping[str, int | None] = {
        "page size": settings.page_size,
        "requests": settings.max_batch,
        "rows": settings.max_batch_tokens,
    }
    given = [name for name, size in by_name.items() if size is not None]
    if len(given) == len(by_name):
        return "as set"
    defaults = f"defaults of this {platform.upper()}"
    if is_smaller:
        defaults += ", made smaller to leave memory for KV"
    return f"{' and '.join(given)} as set, the rest {defaults}" if given else defaults
