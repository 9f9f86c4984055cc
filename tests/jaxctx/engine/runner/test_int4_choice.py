import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxctx.engine.runner import int4_choice
from jaxctx.engine.runner.check.remembered import CheckMemory
from jaxctx.engine.runner.check.time_limit import NeverEnds
from jaxctx.engine.runner.int4_choice import IN, OUT, Trial, choose_int4, why_wrong
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_kernels.int4_weights import CHUNK, OLDEST_JAX, Int4Choice, multiply

TPU = SimpleNamespace(
    platform="tpu",
    device_kind="TPU v5e",
    memory_stats=lambda: None,
    client=SimpleNamespace(platform_version="libtpu"),
)
TRIAL = Trial(CheckMemory(None), 600)  # nothing is remembered


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
    assert choose_int4(jax.devices()[0], TRIAL) == Int4Device(None, "there is no product of 4 bits for a cpu")


def test_a_kernel_that_is_right_is_taken(with_product):
    with_product(lambda product: product)
    assert choose_int4(TPU, TRIAL) == Int4Device("tpu")


def test_a_kernel_that_is_wrong_is_not(with_product):
    with_product(lambda product: product.at[3, 5].add(0.01 * product.max()))
    found = choose_int4(TPU, TRIAL)
    assert found.kernel is None
    assert found.why_no_kernel.startswith("their product is wrong here, by 0.0")
    with_product(lambda product: product * np.nan)
    assert choose_int4(TPU, TRIAL).why_no_kernel.startswith("their product is wrong here, by nan")
    assert choose_int4(TPU, None) == Int4Device("tpu")  # nothing runs


def test_a_kernel_that_does_not_run_is_not(with_product):
    def fail(product):
        raise RuntimeError("no such\ninstruction")

    with_product(fail)
    assert choose_int4(TPU, TRIAL) == Int4Device(
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


def test_what_was_right_is_not_compared_again(with_product, tmp_path):
    trial, compared = Trial(CheckMemory(tmp_path), 600), []
    with_product(lambda product: compared.append(1) or product)
    assert [choose_int4(TPU, trial) for _ in range(3)] == [Int4Device("tpu")] * 3
    assert len(compared) == 2  # products
    other = SimpleNamespace(**vars(TPU) | {"device_kind": "TPU v6e"})
    assert choose_int4(other, trial) == Int4Device("tpu")
    assert len(compared) == 4


def test_what_is_wrong_is_compared_again(with_product, tmp_path):
    trial = Trial(CheckMemory(tmp_path), 600)
    with_product(lambda product: 2 * product)
    assert choose_int4(TPU, trial).kernel is None
    with_product(lambda product: product)
    assert choose_int4(TPU, trial) == Int4Device("tpu")


def test_a_kernel_that_ends_the_process_does_so_twice(with_product, monkeypatch, tmp_path):
    """Here an error that nobody catches: what was begun stays so, as where the process is gone."""
    memory = CheckMemory(tmp_path)
    monkeypatch.setattr(memory, "forget", lambda key: None)
    monkeypatch.setattr(int4_choice, "why_wrong", lambda *_: (_ for _ in ()).throw(SystemExit))
    with_product(lambda product: product)
    for _ in range(2):
        with pytest.raises(SystemExit):
            choose_int4(TPU, Trial(memory, 600))
    found = choose_int4(TPU, Trial(CheckMemory(tmp_path), 600))
    assert found.kernel is None
    (file,) = tmp_path.iterdir()
    assert found.why_no_kernel == f"their product ended this process, twice; to try it again, delete {file}"


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_kernel_that_never_ends_does_so_once(with_product, monkeypatch, tmp_path, is_remembered):
    end = threading.Event()
    monkeypatch.setattr(int4_choice, "why_wrong", lambda *_: end.wait() and "")
    with_product(lambda product: product)
    trial = Trial(CheckMemory(tmp_path if is_remembered else None), 0.05)
    what_now = "the next start makes weights wide" if is_remembered else "start with --weights-dtype bfloat16"
    try:
        with pytest.raises(NeverEnds, match=f"^a product of groups of 128: did not end .*; {what_now}$") as raised:
            choose_int4(TPU, trial)
    finally:
        end.set()
    assert raised.value.of == "weights of 4 bits"
    if is_remembered:
        assert choose_int4(TPU, trial).why_no_kernel.startswith("their product never ends; to try it again, delete ")
