import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.drafting.sizes import MAX_REQUESTS, MAX_ROWS, draft_config
from tests.echo import EchoModel

LARGE = EngineConfig(pages=4096, page_size=64, max_batch=256, max_batch_tokens=2048, max_context_tokens=8192)
SMALL = EngineConfig(pages=10, max_batch=2, max_batch_tokens=8, max_context_tokens=100, draft_tokens=3)


@pytest.mark.parametrize(
    ("served", "positions", "kv_tokens", "expected"),
    [
        (LARGE, 1 << 20, None, (16 * 2048, 8192)),  # some for each of sixteen
        (LARGE, 1024, None, (16 * 1024, 1024)),  # no more than sixteen contexts can have
        (LARGE, 1 << 20, 100, (128, 128)),  # whole pages, and no context beyond them
        (SMALL, 1 << 20, None, (160, 100)),  # no more than the large model has
    ],
)
def test_kv_and_the_longest_context(served, positions: int, kv_tokens, expected: tuple[int, int]) -> None:
    config = draft_config(served, EchoModel(max_positions=positions), kv_tokens)
    assert (config.pages * config.page_size, config.max_context_tokens) == expected


def test_a_context_of_full_length_fits_by_default() -> None:
    long = EngineConfig(pages=4096, page_size=64, max_batch=256, max_batch_tokens=2048, max_context_tokens=131_072)
    config = draft_config(long, EchoModel(), None)
    assert config.pages * config.page_size == config.max_context_tokens == 131_072


def test_rows_and_requests() -> None:
    large, small = draft_config(LARGE, EchoModel()), draft_config(SMALL, EchoModel())
    assert (large.max_batch, large.max_batch_tokens, large.page_size) == (MAX_REQUESTS, MAX_ROWS, 64)
    assert (small.max_batch, small.max_batch_tokens, small.draft_tokens) == (2, 8, 3)
