"""Quantised checkpoints of other programs: what `quantization_config` says, and what their tensors hold.

    config.py           quantization_config ──▶ Quantization, or a refusal that names field and value
    compressed.py …     the fields of each quant_method
    packing.py          several small integers in one of 32 bits ◀──▶ one integer each
    matrix.py           which tensors a stored matrix is, whether they agree, and its values and scales
    grouped.py          values with a scale for each group ──▶ floating numbers

Nothing here reads a file: `weights` does, and shows the rest of loading a checkpoint as if it were stored in our forms.
"""
