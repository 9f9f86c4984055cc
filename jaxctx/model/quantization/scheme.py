"""How matrices are stored: the record that every `quant_method` is read into."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["values", "packed", "awq", "gptq"]
"""`values`: a tensor of 8 bits, `[out, in]`. `packed`: integers of 32 bits that hold several, along the inputs
(compressed-tensors). `awq`, `gptq`: as those programs pack them, with the inputs first."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How some of a checkpoint's matrices are stored.

    `block` is the output and input channels that share a scale; 0: all of them.
    """

    layout: Layout
    dtype: str  # of a value: "int4", "int8", "float8_e4m3fn", "float4_e2m1"
    block: tuple[int, int]
    scale_names: tuple[str, ...]  # of the tensor with the scales, one of them; behind the module's name
    has_zeros: bool = False  # what is subtracted from a value before it is scaled, one for each scale
    zeros_minus_one: bool = False  # they are stored less 1
    input_groups: bool = False  # a tensor says which group each input is in; else they are in order

    @property
    def bits(self) -> int:
        """Of a value."""
        return 4 if self.dtype in ("int4", "float4_e2m1") else 8

    @property
    def is_kept(self) -> bool:
        """Whether it can be a `QuantizedWeight`: 8 bits, and a scale for each output channel or for all of them."""
        of_channels = self.block in ((0, 0), (1, 0))
        return self.bits == 8 and of_channels and not self.has_zeros and self.layout in ("values", "packed")

    def describe(self) -> str:
        """A few words for a message."""
        kind = {"int4": "4-bit integers", "int8": "8-bit integers"}.get(self.dtype, self.dtype)
        out, inside = self.block
        if self.block == (0, 0):
            return f"{kind} with a scale for each matrix"
        if inside == 0:
            return f"{kind} with a scale for each output channel"
        if out == 1:
            return f"{kind} with a scale for each {inside} inputs"
        return f"{kind} with a scale for each {out}×{inside}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `quantization_config` says: a checkpoint's matrices are stored in one of `schemes`, or wide."""

    method: str
    schemes: tuple[WeightScheme, ...]

    @property
    def kept_dtype(self) -> str | None:
        """The type of the values that are loaded as they are; None: all matrices become wide."""
        return next((scheme.dtype for scheme in self.schemes if scheme.is_kept), None)

    def keeps(self, scheme: WeightScheme) -> bool:
        """Whether matrices stored so are loaded with the values that they have."""
        return scheme.is_kept and scheme.dtype == self.kept_dtype
