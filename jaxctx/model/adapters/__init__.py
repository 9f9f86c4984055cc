"""LoRA adapters: low-rank changes of a model's matrices, read from PEFT directories and put beside the parameters.

    peft.py   a directory to an `Adapter`, or a refusal that names the file and the key
    slots.py  adapters to the parameters `lora_a` and `lora_b`, see `layers.linear.Linear`

What an adapter is called, who uses it and when its slot is free is the engine's business. Pickles are never read.
"""

from jaxctx.model.adapters.peft import Adapter, LowRankChange, read_adapter
from jaxctx.model.adapters.slots import adapter_parameters

__all__ = ["Adapter", "LowRankChange", "adapter_parameters", "read_adapter"]
