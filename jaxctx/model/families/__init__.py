"""The model families: a file each, which reads its `config.json` and knows where its tensors are.

    family.py     what a family file gives the registry
    fields.py     the fields that families share: sizes, windows, token ids, and those that change no computed value
    rope.py       the fields of rotary position embeddings
    experts.py    the fields of mixtures of experts, and where their tensors are
    llama.py …    the families

A family file shows what is special about the family; what it computes is `decoder.Decoder`, by the `ModelConfig` that
the file makes. `registry.py` maps `architectures[0]` to a family.
"""
