"""What Forward tells of distributions, through gRPC and of the bundled model: the same bits each time, and true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.factory import ServedModel
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import load_text
from jaxctx.model.weights import load_model
from scripts.dense import DenseCausal
from tests.e2e.echo_contexts import THOUSAND, filled, unchanged
from tests.engines import on_demand

pytestmark = pytest.mark.slow  # compiles the bundled model; test_scenarios.py refills pages of the echo model

IDS = [0, 7, 4095, 100, 7]
GREEDY: jaxctx.SamplingOptions = {"temperature": 0.0, "seed": 1}
# Few shapes are compiled: what is filled is a multiple of 8 tokens.
CONFIG = EngineConfig(pages=80, max_batch=4, max_batch_tokens=8, max_context_tokens=1024)


@pytest.fixture(scope="module")
def bundled() -> ServedModel:
    loaded = load_model(BUNDLED, dtype="float32")
    return ServedModel(
        model=loaded.model,
        params=loaded.params,
        text=load_text(BUNDLED),
        model_id="bundled",
        revision="bundled-float32",
        architecture="Qwen3ForCausalLM",
        parameters=0,
        dtype="float32",
        weights_dtype="float32",
    )


@pytest.fixture
def engine_config() -> EngineConfig:
    return CONFIG


@pytest.fixture
def engine(make_engine, bundled, devices):
    key = (bundled.revision, CONFIG.page_size, "")
    if key not in devices:
        devices[key] = on_demand(bundled, CONFIG)
    return make_engine(CONFIG, bundled)


@pytest.fixture(scope="module")
def dense(bundled) -> np.ndarray:
    """Logits after the last eight of a thousand tokens, without pages."""

    @jax.jit
    def last(params, tokens):
        hidden = bundled.model.hidden(params, tokens, jnp.arange(1000, dtype=jnp.int32), DenseCausal())
        return bundled.model.logits(params, hidden[-8:])

    return np.asarray(last(bundled.params, jnp.asarray(THOUSAND, jnp.int32)))


EVERYTHING = [
    jaxctx.ForwardOutputOptions(index=row, logits=True, logprob_ids=IDS, top=20, entropy=True, sample=GREEDY)
    for row in range(8)
]


async def test_refilled_tokens_have_bit_equal_logits(client, dense) -> None:
    context = await filled(client, THOUSAND[:992])
    first = await context.forward(THOUSAND[992:], outputs=EVERYTHING)
    assert (first.context.committed_pages, first.context.working_tokens) == (62, 8)
    async with unchanged(client, context):
        with pytest.raises(errors.OutOfRange):
            await context.truncate(9)
    info = await context.truncate(8)
    assert (info.seq_len, info.working_pages) == (992, 1)
    again = await context.forward(THOUSAND[992:], outputs=EVERYTHING)
    assert [each.logits for each in again.outputs] == [each.logits for each in first.outputs]
    assert again.outputs == first.outputs

    (fork,) = await context.fork()
    await fork.rewind(992)
    assert (await fork.forward(THOUSAND[992:], outputs=EVERYTHING)).outputs == first.outputs, "on shared pages too"

    logits = np.stack([np.frombuffer(each.logits, "<f4") for each in first.outputs])
    np.testing.assert_allclose(logits, dense, rtol=1e-3, atol=1e-3)
    assert np.abs(np.diff(dense, axis=0)).max(axis=1).min() > 1, "rows are apart"


async def test_all_that_is_told_follows_from_the_logits(client) -> None:
    context = await filled(client, THOUSAND[:96])
    result = await context.forward(THOUSAND[992:], outputs=EVERYTHING)
    assert [each.index for each in result.outputs] == [*range(8)]
    for told in result.outputs:
        logits = np.frombuffer(told.logits, "<f4").astype(np.float64)
        assert logits.shape == (4096,)
        logprobs = logits - np.logaddexp.reduce(logits)
        np.testing.assert_allclose(told.logprobs, logprobs[IDS], rtol=1e-6, atol=1e-6)
        order = np.argsort(-logits, kind="stable")[:20]
        assert [token for token, _ in told.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in told.top], logprobs[order], rtol=1e-6, atol=1e-6)
        assert told.entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), rel=1e-6)
        assert told.token_id == order[0]
