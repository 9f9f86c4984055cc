"""Models and their chat templates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as it is served."""

    model_id: str  # its name on this server
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str  # for example "llama" or "qwen3"
    parameters: int  # number of parameters
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    max_context_tokens: int  # the longest sequence, prompt and output together, in tokens
    page_size: int  # tokens per KV page
    dtype: str  # numerical type of activations, and of weights but those that have `weights_dtype`
    weights_dtype: str  # numerical type of the layers' matrices: `dtype`, "int8", "float8_e4m3fn" or "int4"
    kv_dtype: str  # numerical type of keys and values
    default_max_tokens: int  # `max_tokens` of a GenerateRequest that sets none
    tool_call_format: str = ""  # how it writes calls of tools, for example "hermes"; empty: not known
    reasoning_format: str = ""  # how it writes its thoughts, for example "think"; empty: not at all
    # Marks of these two formats that are special tokens, with their ids.
    special_markers: Mapping[str, int] = field(default_factory=dict)
    parent_model_id: str = ""  # of an adapter: the model that it changes. Empty: it is a model itself
    adapter_revision: str = ""  # of an adapter: digest of its content; `model_revision` is its model's


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Chat messages as the model reads them, made by its chat template."""

    text: str  # the text
    tokens: Sequence[int] = ()  # its token ids: what Fill appends to an empty context

    def __str__(self) -> str:
        return self.text
