"""Small checkpoints in every format."""

import pytest

from jaxctx.model.weights import convert
from scripts.checkpoints import write_random


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A safetensors directory of one file."""
    write_random(tmp_path / "hf", tiny, seed=1)
    return tmp_path / "hf"


@pytest.fixture
def sharded(tiny, tmp_path):
    """The same parameters in three shards."""
    write_random(tmp_path / "sharded", tiny, seed=1, shards=3)
    return tmp_path / "sharded"


@pytest.fixture
def orbax(checkpoint, tmp_path):
    """The same parameters as an Orbax directory."""
    convert(checkpoint, tmp_path / "orbax")
    return tmp_path / "orbax"
