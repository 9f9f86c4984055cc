"""What a caller may choose, by keyword. Defaults, ranges and meaning: the fields of these names in protos/jaxctx/v1.

Times are in seconds; a `ttl_s` of `math.inf` is for ever, and None, like anything not given, leaves it to the server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

Message = Mapping[str, str]  # {"role": …, "content": …}
Ranges = Sequence[tuple[int, int]]


class Content(TypedDict, total=False):
    """What a fill appends, where it is not a text: tokens or messages. And how: FillRequest and ChatMessages."""

    tokens: Sequence[int] | None
    messages: Sequence[Message] | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None


class SamplingOptions(TypedDict, total=False):
    """How a token is drawn."""

    temperature: float  # 0: greedy; default 1
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int


class GenerateOptions(SamplingOptions, total=False):
    """How to continue a context: GenerateRequest."""

    max_tokens: int
    min_tokens: int
    logprobs: bool
    top_logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool


class Life(TypedDict, total=False):
    """Of whatever may end by itself."""

    ttl_s: float | None  # how long it lives from now on
    sliding: bool  # every use starts `ttl_s` again


class KeepOptions(Life, total=False):
    """Of snapshots and publications."""

    labels: Mapping[str, str] | None


class SaveOptions(KeepOptions, total=False):
    """A new version of a snapshot: SaveRequest."""

    durable: bool
    overwrite_version: int | None


class Settings(Life, total=False):
    """Of every context."""

    priority: int | None
    pinned: bool | None
    pin_s: float | None  # how long it is pinned; needs `pinned`


class CreateOptions(Settings, Content, total=False):
    """A new context, and what is in it at once: CreateContextRequest."""

    context_id: str | None
    model_id: str
    salt: str
    manual_commit: bool
    labels: Mapping[str, str] | None


class OpenOptions(Settings, total=False):
    """A context from a snapshot: OpenRequest."""

    context_id: str | None
    recompute: bool


class UpdateOptions(Settings, total=False):
    """New settings: UpdateContextRequest."""

    labels: Mapping[str, str] | None  # all labels from now on


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int = 0  # which of the pass's tokens
    sample: SamplingOptions | None = None  # draw from it; {} as it is
    logprob_ids: Sequence[int] = ()  # log probabilities of these
    top: int = 0  # the most likely ones
    logits: bool = False  # all of it
    entropy: bool = False
