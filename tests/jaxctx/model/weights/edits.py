"""Changes to checkpoints, and what must be refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.model.weights import CheckpointError, load_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the dictionary of tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_json(path: Path, **change: Any) -> None:
    """Set these keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_header(path: Path, **changes: Any) -> None:
    """Rewrite a safetensors file's header, which says where in the file each tensor is."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size]) | changes).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def assert_refused(path: Path, match: str, **options: Any) -> None:
    """Loading the directory must raise a CheckpointError with this message."""
    with pytest.raises(CheckpointError, match=match):
        load_model(path, **options)
