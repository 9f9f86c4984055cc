from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxctx.engine.runner import int4_choice
from jaxctx.engine.runner.int4_choice import IN, OUT, choose_int4, why_wrong
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_kernels.int4_weights import CHUNK, OLDEST_JAX, Int4Choice, multiply

TPU = SimpleNamespace(platform="tpu")


@pytest.fixture
def with_product(monkeypatch):
    """Have a device whose kernel computes what the given function does of the right product."""

    def use(change):
        def run(x, words, scales, kernel):
            return change(multiply(x, words, scales, "reference"))

        monkeypatch.setattr(int4_choice, "multiply", run)
        monkeypatch.setattr(int4_choice, "select_product", lambda device: Int4Choice("tpu"))

    return use


def test_a_cpu_has_none():
    assert choose_int4(jax.devices()[0], is_there=True) == Int4Device(None, "there is no product of 4 bits for a cpu")


def test_a_kernel_that_is_right_is_taken(with_product):
    with_product(lambda product: product)
    assert choose_int4(TPU, is_there=True) == Int4Device("tpu")


def test_a_kernel_that_is_wrong_is_not(with_product):
    with_product(lambda product: product.at[3, 5].add(0.01 * product.max()))
    found = choose_int4(TPU, is_there=True)
    assert found.kernel is None
    assert found.why_no_kernel.startswith("their product is wrong here, by 0.0")
    with_product(lambda product: product * np.nan)
    assert choose_int4(TPU, is_there=True).why_no_kernel.startswith("their product is wrong here, by nan")
    assert choose_int4(TPU, is_there=False) == Int4Device("tpu")  # nothing runs


def test_a_kernel_that_does_not_run_is_not(with_product):
    def fail(product):
        raise RuntimeError("no such\ninstruction")

    with_product(fail)
    assert choose_int4(TPU, is_there=True) == Int4Device(
        None, "their product does not run here: RuntimeError: no such instruction"
    )


def test_what_plain_jax_computes_is_right():
    assert why_wrong("reference", 128, True) == why_wrong("reference", 32, False) == ""


@pytest.mark.skipif(jax.__version_info__ < OLDEST_JAX, reason="this JAX is too old for the kernels")
def test_kernels_go_through_several_chunks_one_after_the_other():
    from jaxctx_kernels import mosaic_int4, pallas_tpu_int4

    chunks = IN // CHUNK
    assert 1 < pallas_tpu_int4.most_chunks(chunks) < chunks
    assert mosaic_int4.parts_of(chunks, OUT // mosaic_int4.OUTPUTS) < chunks
