"""A server process of the bundled model that takes long prompts: those of coding agents have tens of thousands of tokens.

The model has learnt 2,048 positions; after those its text is worse still, and all else is the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from jaxctx.model.bundled import BUNDLED
from tests.e2e.server_processes import Server

POSITIONS = 32_768
SIZES = ("--max-batch", "8", "--max-batch-tokens", "256", "--kv-tokens", str(2 * POSITIONS))


def long_checkpoint(folder: Path) -> Path:
    """The bundled checkpoint, copied, with `POSITIONS` positions. Its folder's name is the model's."""
    checkpoint = folder / "long"
    shutil.copytree(BUNDLED, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


def long_server(cache: Path, folder: Path) -> Server:
    """A server of it."""
    return Server(str(long_checkpoint(folder)), *SIZES, cache=cache)
