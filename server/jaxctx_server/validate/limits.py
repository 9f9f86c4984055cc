"""What may be asked of one server: the bounds of the contract, and those of its model."""

from dataclasses import dataclass
from typing import Self

from jaxctx.answers import EngineInfo, named

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Without a default: of the model and the configuration. With one: of the contract, and documented there."""

    vocab_size: int
    max_context_tokens: int
    default_max_tokens: int
    queue_limit: int  # requests that may wait

    max_text_bytes: int = 2 << 20  # of a text, and of all messages together
    max_messages: int = 1024
    max_role_bytes: int = 64
    max_detokenize_tokens: int = 1 << 17

    max_name_bytes: int = 256  # of a model id
    max_salt_bytes: int = 256
    max_priority: int = 100
    max_labels: int = 32
    max_label_key_bytes: int = 64
    max_label_value_bytes: int = 256
    max_ttl_s: int = 315_576_000  # 10 years
    max_snapshot_name_bytes: int = 100
    max_children: int = 1024
    max_page_size: int = 1000  # entries of one page of a list
    default_page_size: int = 100

    max_outputs: int = 128
    max_top_logprobs: int = 20
    max_stops: int = 16
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_bias: float = 100.0
    max_temperature: float = 100.0
    max_repetition_penalty: float = 10.0
    max_penalty: float = 2.0

    max_mask_ranges: int = 64  # of one token
    max_ranges: int = 1 << 16  # of a pass
    max_pass_outputs: int = 256
    max_logprob_ids: int = 1024
    max_pass_top: int = 64
    max_logits_bytes: int = 48 << 20  # of a pass; a message holds 64 MiB

    @classmethod
    def of(cls, info: EngineInfo, *, queue_limit: int) -> Self:
        """The limits of an engine."""
        return cls(queue_limit=queue_limit, **named(cls, info))
