"""Products with the experts that rows chose, against numpy in float64: as this CPU computes them, and other devices."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model import expert_products
from jaxctx.model.config import ClampedGate
from jaxctx.model.expert_products import (
    ExpertWeights,
    bfloat16_arrays,
    feed_by_kernel,
    feed_experts,
    feed_in_sums,
    feed_in_tiles,
    fits_hopper,
    multiply_on_hopper,
    multiply_on_tpu,
    part_of,
    project_on_cpu,
    project_one,
    rows_of_tile,
    sort_pairs,
    sum_by_row,
)
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.layers.feed_forward import clamped_gate, plain_gate
from jaxctx.model.products import SUMS_ARE_FAST, TAKES_BITS, QuantizedWeight
from jaxctx.model.weights.quantize import quantize

EXPERTS, WIDTH, FFN, TAKEN = 5, 64, 96, 2

CHOICES = {
    "spread": lambda rng, rows: np.argsort(rng.random((rows, EXPERTS)))[:, :TAKEN],
    "all take the same": lambda rng, rows: np.tile([3, 1], (rows, 1)),
    "two experts have none": lambda rng, rows: np.argsort(rng.random((rows, 3)))[:, :TAKEN] + 1,
}
by_choice = pytest.mark.parametrize("choice", CHOICES)
by_kind = pytest.mark.parametrize("is_clamped", [False, True], ids=["plain", "clamped and with biases"])
SILU = partial(plain_gate, "silu")
CLAMPED = ClampedGate(slope=1.7, limit=0.8)  # several of the products are beyond


class Case:
    """Rows, what they chose, and weights; `meant` is what the weights stand for."""

    def __init__(
        self,
        rows: int,
        choice: str,
        dtype: str = "float32",
        weights: str | None = None,
        matmul: str = "float32",
        is_clamped: bool = False,
    ) -> None:
        rng = np.random.default_rng(rows)
        self.x = jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32)
        self.chosen = jnp.asarray(CHOICES[choice](rng, rows), jnp.int32)
        self.scores = jnp.asarray(rng.random((rows, TAKEN)), jnp.float32)
        shapes = (EXPERTS, FFN, WIDTH), (EXPERTS, FFN, WIDTH), (EXPERTS, WIDTH, FFN)
        wide = [np.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), np.float32) for shape in shapes]
        if weights is None:
            made = [jnp.asarray(each, dtype) for each in wide]
            self.meant = [np.asarray(each, np.float64) for each in made]
        else:
            quantized = [quantize(each, weights) for each in wide]
            self.meant = [v.astype(np.float64) * s.astype(np.float64)[..., None] for v, s in quantized]
            held = [(jnp.asarray(v.view(EIGHT_BITS[weights])), jnp.asarray(s)) for v, s in quantized]
            made = [QuantizedWeight(values, scale, matmul) for values, scale in held]
        self.is_clamped = is_clamped
        self.gate = partial(clamped_gate, CLAMPED) if is_clamped else SILU
        self.biases = [rng.normal(size=shape[:2]).astype(np.float32) * is_clamped for shape in shapes]
        self.weights = ExpertWeights(*made, *(jnp.asarray(each, dtype) if is_clamped else None for each in self.biases))
        if is_clamped:
            self.biases = [np.asarray(each, np.float64) for each in self.weights[3:]]

    def want(self) -> np.ndarray:
        """In float64: `[rows, WIDTH]`."""
        gate, up, down = self.meant
        x, chosen, scores = (np.asarray(a, np.float64) for a in (self.x, self.chosen, self.scores))
        out = np.zeros_like(x)
        for row, n in np.ndindex(chosen.shape):
            expert = int(chosen[row, n])
            of_gate, of_up, of_down = (bias[expert] for bias in self.biases)
            gated, beside = gate[expert] @ x[row] + of_gate, up[expert] @ x[row] + of_up
            if self.is_clamped:
                gated, beside = np.minimum(gated, CLAMPED.limit), np.clip(beside, -CLAMPED.limit, CLAMPED.limit) + 1
            gated = gated / (1 + np.exp(-gated * (CLAMPED.slope if self.is_clamped else 1))) * beside
            out[row] += scores[row, n] * (down[expert] @ gated + of_down)
        return out

    def feed(self, padding: jax.Array | None = None) -> jax.Array:
        fed = jax.jit(lambda *given: feed_experts(*given, self.gate, padding))
        return fed(self.x, self.chosen, self.scores, self.weights)

    def feed_as(self, feed) -> jax.Array:
        """By one of the other ways: `feed(x, pairs, weights)`."""

        @jax.jit
        def run(x, chosen, scores, weights):
            pairs = sort_pairs(chosen, EXPERTS, None)
            return sum_by_row(feed(x, pairs, weights), pairs, scores)

        return run(self.x, self.chosen, self.scores, self.weights)


def assert_near(got, want, tolerance):
    assert got.dtype == jnp.float32
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@by_choice
@by_kind
@pytest.mark.parametrize("rows", [1, 4, 9, 40, 130])
def test_no_row_is_left_out_and_none_is_mixed_up(rows: int, choice: str, is_clamped: bool) -> None:
    case = Case(rows, choice, is_clamped=is_clamped)
    assert_near(case.feed(), case.want(), 1e-5)


@by_choice
@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("widens", [False, True])
def test_weights_of_bfloat16(monkeypatch: pytest.MonkeyPatch, rows: int, choice: str, widens: bool) -> None:
    """As CPUs with AVX-512 multiply them, and as those without: by blocks of float32."""
    monkeypatch.setattr(expert_products, "WIDENS_BFLOAT16", widens and not TAKES_BITS)
    case = Case(rows, choice, "bfloat16")
    assert_near(case.feed(), case.want(), 0.02)


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize(
    ("weights", "matmul", "tolerance"),
    [
        ("int8", "float32", 1e-5),
        ("int8", "bfloat16", 0.02),
        ("int8", "int8", 0.03),
        ("int8", "int16", 1e-3),
        ("float8_e4m3fn", "float32", 1e-5),
    ],
)
def test_weights_of_8_bits(rows: int, weights: str, matmul: str, tolerance: float) -> None:
    """They have a scale for each expert and output channel."""
    case = Case(rows, "spread", weights=weights, matmul=matmul, is_clamped=rows == 9)
    assert_near(case.feed(), case.want(), tolerance)


@pytest.mark.parametrize("tile", [1, 4, 32])
@by_choice
def test_tiles_of_any_size(monkeypatch: pytest.MonkeyPatch, choice: str, tile: int) -> None:
    """Also where the weights of an expert are taken in several blocks."""
    monkeypatch.setattr("jaxctx.model.products.BLOCK_ELEMENTS", 64 * WIDTH)
    case = Case(40, choice, is_clamped=tile == 4)
    for project in (project_on_cpu, project_one):
        feed = partial(feed_in_tiles, gate=case.gate, tile=tile, project=project)
        assert_near(case.feed_as(feed), case.want(), 1e-5)


@by_choice
@by_kind
@pytest.mark.parametrize("weights", [None, *EIGHT_BITS])
def test_sums_of_a_gpu(weights: str | None, choice: str, is_clamped: bool) -> None:
    case = Case(9, choice, weights=weights, is_clamped=is_clamped)
    assert_near(case.feed_as(partial(feed_in_sums, gate=case.gate)), case.want(), 1e-5)


@by_choice
@by_kind
@pytest.mark.parametrize("rows", [3, 70])
def test_the_grouped_product_of_a_tpu(
    monkeypatch: pytest.MonkeyPatch, rows: int, choice: str, is_clamped: bool
) -> None:
    """As an interpreter computes it. The parts are such that no axis divides into them evenly."""
    module = import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    monkeypatch.setattr(module, "gmm", partial(module.gmm, interpret=True))
    monkeypatch.setattr(expert_products, "TPU_ROWS", 32)
    case = Case(rows, choice, "bfloat16", is_clamped=is_clamped)

    def feed(x, pairs, weights):
        return feed_by_kernel(x, pairs, weights, case.gate, multiply_on_tpu)

    assert_near(case.feed_as(feed), case.want(), 0.02)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the GPU interpreter of JAX 0.12 or newer is needed")
@by_choice
@pytest.mark.parametrize("rows", [pytest.param(3, marks=pytest.mark.campaign), 70])
def test_the_grouped_product_of_a_gpu(rows: int, choice: str) -> None:
    """As an interpreter computes it, with rows of padding behind the others, which belong to no expert."""
    from jax.experimental.pallas import mosaic_gpu

    case = Case(rows, choice, "bfloat16", is_clamped=rows == 70)
    padding = jnp.arange(rows) == rows - 1
    pairs = sort_pairs(case.chosen, EXPERTS, padding)
    weights = padded_to_blocks(case.weights)
    assert fits_hopper(bfloat16_arrays(weights))
    assert not fits_hopper(bfloat16_arrays(case.weights))
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        fed = feed_by_kernel(case.x, pairs, weights, case.gate, multiply_on_hopper)
    got = sum_by_row(fed, pairs, case.scores)[:-1]
    assert_near(got, case.want()[:-1], 0.02)


def padded_to_blocks(weights: ExpertWeights) -> ExpertWeights:
    """The same function, of feed-forward blocks with zeros for a whole number of blocks."""
    more = -FFN % 64
    into, back = ((0, 0), (0, more), (0, 0)), ((0, 0), (0, 0), (0, more))
    gate_bias, up_bias = (
        None if bias is None else jnp.pad(bias, ((0, 0), (0, more))) for bias in (weights.gate_bias, weights.up_bias)
    )
    gate, up, down = jnp.pad(weights.gate, into), jnp.pad(weights.up, into), jnp.pad(weights.down, back)
    return ExpertWeights(gate, up, down, gate_bias, up_bias, weights.down_bias)


@pytest.mark.parametrize(
    ("size", "part"), [(2048, 2048), (14336, 2048), (768, 768), (1408, 1408), (96, 96), (4224, 1408)]
)
def test_parts_of_an_axis_are_whole_lanes_that_divide_it(size: int, part: int) -> None:
    assert part_of(size, 2048) == part


@pytest.mark.parametrize("rows", [3, 40])
def test_rows_that_are_padding_ask_no_expert(rows: int) -> None:
    case = Case(rows, "spread")
    padding = jnp.arange(rows) >= rows - 2
    fed = np.asarray(case.feed(padding))
    assert (fed[-2:] == 0).all()
    assert_near(fed[:-2], case.want()[:-2], 1e-5)
    pairs = sort_pairs(case.chosen, EXPERTS, padding)
    assert int(pairs.sizes.sum()) == (rows - 2) * TAKEN
    case.x = case.x.at[-2:].set(jnp.nan)
    np.testing.assert_array_equal(case.feed(padding), fed)


@pytest.mark.parametrize("rows", [2, 9, 40])
def test_a_rows_bits_do_not_depend_on_the_other_rows(rows: int) -> None:
    """In a step of the same size: whatever the others hold, and whichever experts they choose."""
    case = Case(rows, "spread", "bfloat16")
    alone = np.asarray(case.feed())[0]
    others = np.random.default_rng(0)
    case.x = case.x.at[1:].set(jnp.asarray(others.normal(size=(rows - 1, WIDTH)), jnp.float32))
    for taken in ([0, 1], [3, 2], list(case.chosen[0])):
        case.chosen = case.chosen.at[1:].set(jnp.asarray(taken))
        np.testing.assert_array_equal(np.asarray(case.feed())[0], alone)
    case.x = case.x.at[1].set(jnp.nan)  # nor does what is not finite reach it
    np.testing.assert_array_equal(np.asarray(case.feed())[0], alone)


def test_pairs_are_sorted_by_expert() -> None:
    chosen = jnp.asarray([[2, 0], [1, 2], [2, 1]])
    pairs = sort_pairs(chosen, 4, jnp.asarray([False, False, True]))
    assert pairs.sizes.tolist() == [1, 1, 2, 0]
    assert pairs.rows.tolist() == [0, 1, 0, 1, 2, 2]
    assert pairs.places.tolist() == [[2, 0], [1, 3], [4, 5]]


def test_a_tile_is_as_large_as_experts_have_pairs() -> None:
    sizes = [rows_of_tile(pairs, 8) for pairs in (2, 16, 17, 32, 33, 128, 129, 1024)]
    assert sizes[2:] == [8, 8, 32, 32, 64, 64]
    assert sizes[0] == sizes[1] < 8


@pytest.mark.skipif(not SUMS_ARE_FAST, reason="JAX 0.10 has no sums for a row alone, and copies weights for products")
def test_a_cpu_copies_no_weights_for_a_row_alone() -> None:
    """Nor does it compute what no row chose: temporaries are far below the size of one expert's matrix."""
    experts, width, ffn = 16, 1024, 2048
    shapes = (experts, ffn, width), (experts, ffn, width), (experts, width, ffn)
    weights = ExpertWeights(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    x, scores = jax.ShapeDtypeStruct((1, width), jnp.float32), jax.ShapeDtypeStruct((1, 2), jnp.float32)
    chosen = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    run = jax.jit(lambda *given: feed_experts(*given, SILU))
    found = run.lower(x, chosen, scores, weights).compile().memory_analysis()
    assert found.temp_size_in_bytes < width * ffn * 2 // 5
