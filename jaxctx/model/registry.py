"""The registry: `architectures[0]` of a `config.json` → the family that reads it.

A family that is not here is refused by name; so is a key that its family does not understand.
"""

from collections.abc import Mapping
from typing import Any

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.families.family import Family
from jaxctx.model.families.fields import refuse_unknown
from jaxctx.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from jaxctx.model.families.gpt_oss import GPT_OSS
from jaxctx.model.families.granite import GRANITE
from jaxctx.model.families.llama import LLAMA
from jaxctx.model.families.mistral import MISTRAL
from jaxctx.model.families.mixtral import MIXTRAL
from jaxctx.model.families.olmo import OLMO2, OLMO3
from jaxctx.model.families.phi3 import PHI3
from jaxctx.model.families.qwen import QWEN2, QWEN3
from jaxctx.model.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxctx.model.families.smollm3 import SMOLLM3

_EVERY = (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _EVERY}

NOT_COMPUTED: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "multi-head latent attention is not computed",
    "DeepseekV3ForCausalLM": "multi-head latent attention is not computed",
    "MambaForCausalLM": "state space layers are not computed",
    "Mamba2ForCausalLM": "state space layers are not computed",
    "Phi3SmallForCausalLM": "block-sparse attention is not computed",
    "Qwen3NextForCausalLM": "linear attention is not computed",
}
"""Families that are asked for and not here, with what is missing."""


def from_hf(raw: Mapping[str, Any], *, file: str = "config.json") -> ModelConfig:
    """The record for a Hugging Face configuration, of transformers 4 or 5.

    A key that is missing has the value that the family's class in transformers gives it (`Family.defaults`).
    Raises CheckpointError, naming `file` and the key, for anything malformed, out of bounds, unsupported or unknown.
    """
    family = _family(Reader(raw, file))
    read = Reader(raw, file, defaults=family.defaults)
    refuse_unknown(read, family.fields | family.defaults.keys() | family.ignored)
    return family.read(read)


def _family(read: Reader) -> Family:
    names = read.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        read.refuse("architectures", f"must name one architecture, not {shown(names)}")
    if isinstance(names[0], str) and names[0] in NOT_COMPUTED:
        read.refuse("architectures", f"{shown(names[0])} is not supported: {NOT_COMPUTED[names[0]]}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        read.refuse("architectures", f"{shown(names[0])} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]
