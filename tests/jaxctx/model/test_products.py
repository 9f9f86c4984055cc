import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxctx.engine.runner.compiled_model import ONE_ROW
from jaxctx.model import products
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.products import FEW_ROWS, QuantizedWeight, VectorSums, project, project_and_sum
from jaxctx.model.weights.quantize import quantize


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 3, 4, 17, FEW_ROWS, FEW_ROWS + 1])
def test_products_of_few_rows_and_of_many_are_the_same(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 96)), dtype)
    weight = jnp.asarray(rng.normal(size=(40, 96)), dtype)
    product = jax.jit(project)(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 31, 40, 96, 1024, 3072, 31 * 64, 37 * 32, 64 * 33])
def test_one_row_is_summed_whole_whatever_its_size(size: int) -> None:
    """One vector, vectors narrower than usual, as many as a loop adds at most, and more that divide well or badly."""
    rng = np.random.default_rng(size)
    x, weight = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((1, size), (5, size)))
    product = jax.jit(project)(x, weight)
    assert product.shape == (1, 5)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS + 1])
def test_devices_send_each_other_products_of_the_weights_type(rows: int, dtype: str) -> None:
    """Two: the sum of both, rounded once more in bfloat16; and as a sum of float32 where weights are that."""
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(rows)
    x, weight = jnp.asarray(rng.normal(size=(rows, 96))), jnp.asarray(rng.normal(size=(40, 96)), dtype)
    summed = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh))(x, weight)
    products = [jax.jit(project)(x[:, half], weight[:, half]) for half in (slice(48), slice(48, 96))]
    first, second = (np.asarray(product.astype(dtype), np.float32) for product in products)
    want = jnp.asarray(first + second).astype(dtype)
    assert summed.dtype == jnp.float32
    np.testing.assert_array_equal(summed, np.asarray(want, np.float32))


def test_one_device_rounds_nothing() -> None:
    one = jax.make_mesh((1, 1), ("kv", "group"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    rng = np.random.default_rng(2)
    x, weight = jnp.asarray(rng.normal(size=(5, 96))), jnp.asarray(rng.normal(size=(40, 96)), "bfloat16")
    for mesh in (one, None):
        np.testing.assert_array_equal(project_and_sum(x, weight, mesh), project(x, weight))


def quantized(rng: np.random.Generator, out: int, inside: int, dtype: str, matmul_dtype: str = "bfloat16"):
    """A weight of 8 bits, and what it stands for."""
    values, scale = quantize(rng.normal(size=(out, inside)).astype(np.float32), dtype)
    held = jnp.asarray(values.view(EIGHT_BITS[dtype]))
    meant = values.astype(np.float64) * scale.astype(np.float64)[:, None]
    return QuantizedWeight(held, jnp.asarray(scale), matmul_dtype), meant


@pytest.mark.parametrize("matmul_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("rows", [1, 3, 17, FEW_ROWS + 1])
def test_products_with_8_bits_are_those_with_what_they_stand_for(rows: int, dtype: str, matmul_dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 96)), jnp.float32)
    weight, meant = quantized(rng, 40, 96, dtype, matmul_dtype)
    product = jax.jit(project)(x, weight)
    assert product.dtype == jnp.float32
    want = np.asarray(x.astype(matmul_dtype), np.float64) @ meant.T
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 17, FEW_ROWS + 1])
def test_products_of_int8_round_each_row_to_int8(rows: int) -> None:
    """As numpy rounds them, with a scale a row: one large row does not make the others coarse."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 96)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, size=(rows, 1))
    x = x.astype(np.float32)
    weight, meant = quantized(rng, 40, 96, "int8", "int8")
    product = jax.jit(project)(jnp.asarray(x), weight)
    assert product.dtype == jnp.float32
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    want = np.rint(x / scale).astype(np.float64) * scale @ meant.T
    np.testing.assert_allclose(product / scale, want / scale, rtol=1e-5, atol=1e-3)
    exact = x.astype(np.float64) @ meant.T
    assert np.abs(want - exact).max() > 0
    assert np.all(np.linalg.norm(product - exact, axis=1) < 0.02 * np.linalg.norm(exact, axis=1))


@pytest.mark.parametrize("rows", [1, 3, 17, FEW_ROWS // 2 + 1])
def test_products_of_int16_lose_less_than_those_of_bfloat16(rows: int) -> None:
    """A row that is larger than others does not make them coarse, and most of a row may be far below its largest."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 96)) * 10.0 ** rng.integers(-3, 3, size=(rows, 1))
    x[:, 5] *= 30
    x = x.astype(np.float32)
    weight, meant = quantized(rng, 40, 96, "int8", "int16")
    product = jax.jit(project)(jnp.asarray(x), weight)
    assert product.dtype == jnp.float32
    exact = x.astype(np.float64) @ meant.T
    lost = np.linalg.norm(product - exact, axis=1)
    assert np.all(lost <= 3e-4 * np.linalg.norm(exact, axis=1))
    narrow = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) @ meant.T
    assert np.all(lost < np.linalg.norm(narrow - exact, axis=1))
    if rows > 1:  # as numpy rounds them
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127 * 128)
        want = np.rint(x / scale).astype(np.float64) * scale @ meant.T
        np.testing.assert_allclose(product / scale, want / scale, rtol=1e-5, atol=0.05)


@pytest.mark.parametrize("rows", [2, FEW_ROWS // 2 + 1])
def test_products_of_int16_are_whole_at_the_ends(rows: int) -> None:
    """The largest and smallest numbers of a row, and those where the higher of its parts changes, with both signs."""
    ends = np.asarray([16256, -16256, 16255, 16193, 16192, 16191, 64, -64, 63, -63, 65, -65, 128, 0, 1, -1], np.float32)
    weight = QuantizedWeight(jnp.eye(16, dtype=jnp.int8) * 127, jnp.ones(16, jnp.float32), "int16")
    product = jax.jit(project)(jnp.asarray(np.tile(ends, (rows, 1))), weight)
    np.testing.assert_array_equal(product, np.tile(ends * 127, (rows, 1)))


@pytest.mark.parametrize("matmul_dtype", products.INTEGERS)
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
def test_products_of_integers_of_rows_that_are_zero_or_not_finite(rows: int, matmul_dtype: str) -> None:
    rng = np.random.default_rng(rows)
    weight, _ = quantized(rng, 40, 96, "int8", matmul_dtype)
    for number in (0.0, np.nan, np.inf, -np.inf):
        x = rng.normal(size=(rows, 96)).astype(np.float32)
        x[-1] = 0.0
        x[-1, 3] = number
        product = np.asarray(jax.jit(project)(jnp.asarray(x), weight))
        assert np.isfinite(product[:-1]).all()
        assert (product[-1] == 0).all() if number == 0 else not np.isfinite(product[-1]).any()


@pytest.mark.parametrize("inside", [1536, 96, 40])
@pytest.mark.parametrize("sums", [VectorSums(8, 32, 4), VectorSums(32, 32, 1), VectorSums(16, 64, 4)])
@pytest.mark.parametrize(("name", "dtype"), [("WIDE_SUMS", "bfloat16"), ("INT8_SUMS", "int8")])
def test_a_row_alone_on_cpus_with_vectors_of_any_length(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, sums: VectorSums, inside: int
) -> None:
    """Many loops, one loop, and numbers that fill no vector; terms added to one sum and to several."""
    monkeypatch.setattr(products, name, sums)
    rng = np.random.default_rng(inside)
    x, weight = jnp.asarray(rng.normal(size=inside), "bfloat16"), jnp.asarray(rng.normal(size=(40, inside)) * 3, dtype)
    product = jax.jit(lambda x, weight: products.contract_one(x, weight))(x, weight)
    want = np.asarray(weight, np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("expert", [None, 2])
@pytest.mark.parametrize(("out", "inside"), [(40, 1536), (40, 96), (44, 1536), (8, 1040)])
def test_a_long_row_alone_is_summed_in_parts(
    monkeypatch: pytest.MonkeyPatch, out: int, inside: int, expert: int | None
) -> None:
    """Several parts, one, output channels that are not in whole groups, and a number of vectors with few divisors."""
    monkeypatch.setattr(products, "LONG_ROW", 64)
    monkeypatch.setattr(products, "INT8_SUMS", VectorSums(16, 32, 4))
    rng = np.random.default_rng(out)
    x = jnp.asarray(rng.normal(size=inside), "float32")
    values = jnp.asarray(rng.integers(-127, 128, size=(3, out, inside)), "int8")
    if expert is None:
        product = jax.jit(lambda x, values: products.contract_one(x, values))(x, values[2])
    else:
        product = jax.jit(products.contract_one)(x, values, jnp.asarray(expert))
    want = np.asarray(values[2], np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("out", [64, 128, 129, 191, 200])
def test_blocks_cover_every_output_channel(monkeypatch: pytest.MonkeyPatch, out: int) -> None:
    """One block, several that are alike, and some of which the last one overlaps the one before."""
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 64 * 96)
    rng = np.random.default_rng(out)
    x = jnp.asarray(rng.normal(size=(5, 96)), jnp.float32)
    weight, meant = quantized(rng, out, 96, "int8", "float32")
    product = jax.jit(lambda x, weight: project(x, weight))(x, weight)
    np.testing.assert_allclose(product, np.asarray(x, np.float64) @ meant.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [products.MANY_ROWS - 1, products.MANY_ROWS])
def test_many_rows_meet_widened_blocks_where_a_cpu_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The same numbers as in a product of bfloat16, whose sums are float32, too; no weight is widened as a whole."""
    monkeypatch.setattr(products, "WIDENS_BFLOAT16", not products.TAKES_BITS)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 64 * 96)
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 96)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(200, 96)), jnp.bfloat16)
    lowered = jax.jit(lambda x, weight: project(x, weight)).lower(x, weight)
    in_blocks = "stablehlo.while" in lowered.as_text()
    assert in_blocks == (rows >= products.MANY_ROWS and not products.TAKES_BITS)
    want = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(lowered.compile()(x, weight), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_number_of_8_bits_is_widened_exactly(dtype: str) -> None:
    numbers = np.arange(256, dtype=np.uint8)
    meant = numbers.view(np.int8 if dtype == "int8" else jnp.float8_e4m3fn).astype(np.float32)
    held = jnp.asarray(numbers.view(EIGHT_BITS[dtype]))[np.isfinite(meant)]
    for wide in ("bfloat16", "float32"):
        for widen in (products.widen, products.widen_on_cpu):
            widened = np.asarray(jax.jit(widen, static_argnums=1)(held, wide), np.float32)
            np.testing.assert_array_equal(widened, meant[np.isfinite(meant)])


@pytest.mark.parametrize("rows", [*ONE_ROW, 4, 64])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_cpu_never_holds_a_weight_widened(rows: int, dtype: str) -> None:
    out, inside = 4096, 2048
    weight = QuantizedWeight(
        jax.ShapeDtypeStruct((out, inside), EIGHT_BITS[dtype]), jax.ShapeDtypeStruct((out,), jnp.float32), "bfloat16"
    )
    x = jax.ShapeDtypeStruct((rows, inside), jnp.float32)
    temporaries = jax.jit(project).lower(x, weight).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < out * inside  # a fourth of it is widened at a time, and the product takes up to 1 MiB


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_devices_share_the_scales_of_8_bits(dtype: str) -> None:
    """A device has some of the inputs of every output channel."""
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(5, 96)), jnp.float32)
    weight, meant = quantized(rng, 40, 96, dtype, "float32")
    summed = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh))(x, weight)
    np.testing.assert_allclose(summed, np.asarray(x, np.float64) @ meant.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("matmul_dtype", "lost"), [("int8", 0.02), ("int16", 0.005)])
def test_devices_round_their_part_of_a_row(matmul_dtype: str, lost: float) -> None:
    """And send each other bfloat16."""
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(5, 96)), jnp.float32)
    weight, meant = quantized(rng, 40, 96, "int8", matmul_dtype)
    summed = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh))(x, weight)
    exact = np.asarray(x, np.float64) @ meant.T
    assert np.linalg.norm(summed - exact) < lost * np.linalg.norm(exact)


def test_long_rows_alone_are_summed_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of their sums is asked for by a layout, which has to hold within a device's part too."""
    monkeypatch.setattr(products, "LONG_ROW", 64)
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(1, 2048)), jnp.float32)
    weight, meant = quantized(rng, 40, 2048, "int8", "float32")
    summed = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh))(x, weight)
    np.testing.assert_allclose(summed, np.asarray(x, np.float64) @ meant.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["bfloat16 of many rows", "int8 of few rows"])
def test_weights_that_are_taken_in_blocks_are_summed_over_devices(monkeypatch, kind):
    """Their loop is traced for every kind of device, wherever the step runs."""
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 64 * 64)
    monkeypatch.setattr(products, "WIDENS_BFLOAT16", not products.TAKES_BITS)
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(192, 128)).astype(np.float32)
    if kind.startswith("int8"):
        values, scale = quantize(wide, "int8")
        weight, rows = QuantizedWeight(jnp.asarray(values), jnp.asarray(scale), "float32"), 9
    else:
        weight, rows = jnp.asarray(wide, jnp.bfloat16), products.MANY_ROWS
    x = jnp.asarray(rng.normal(size=(rows, 128)), jnp.float32)
    traced = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh)).trace(x, weight)
    assert "while" in str(traced.jaxpr) or "scan" in str(traced.jaxpr) or products.TAKES_BITS
    summed = traced.lower().compile()(x, weight)
    alone = np.asarray(project(x, weight))
    np.testing.assert_allclose(summed, alone, rtol=0.02, atol=0.02 * np.abs(alone).max())
