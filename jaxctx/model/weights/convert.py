"""Write Orbax checkpoints: from another checkpoint, or from parameters just trained."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxctx.errors import AlreadyExists
from jaxctx.model.bind import DecoderModel, FlatParams, abstract
from jaxctx.model.weights.huggingface import read_json
from jaxctx.model.weights.load import CONFIG, Progress, check, open_source, read_cast, read_config, run_dtype
from jaxctx.model.weights.orbax_format import write_params
from jaxctx.model.weights.source import HostArray

# What belongs to a model besides its weights. Only these names are copied, and only plain files.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "NOTICE",
    "README.md",
)


def convert(src: str | Path, dst: str | Path, *, dtype: str | None = None, progress: Progress | None = None) -> None:
    """Write the checkpoint directory `src` as an Orbax one at `dst`, which appears whole or not at all.

    `dtype` as for `load_model`, which gives both directories the same revision. Holds the parameters in host memory.
    Raises CheckpointError for a bad `src`, AlreadyExists if `dst` is there.
    """
    directory = Path(src)
    config = read_config(directory)
    source = open_source(directory)
    kind = run_dtype(source, dtype)
    model, _ = abstract(config, kind)
    check(source, model, config)
    _refuse_existing(Path(dst))
    arrays = {spec.name: data for spec, data in read_cast(source, model.specs, kind, progress)}
    raw = {key: value for key, value in read_json(directory / CONFIG).items() if key != "torch_dtype"}
    companions = {name: directory / name for name in COMPANIONS if (directory / name).is_file()}
    _write(Path(dst), raw | {"dtype": kind}, arrays, companions)


def save(
    dst: str | Path, model: DecoderModel, params: FlatParams, *, companions: Mapping[str, Path] | None = None
) -> None:
    """Write `params` as an Orbax directory at `dst`, with copies of `companions` (name → file) beside them.

    Raises AlreadyExists if `dst` is there.
    """
    arrays = {spec.name: np.asarray(array) for spec, array in zip(model.specs, params, strict=True)}
    _write(Path(dst), model.config.to_hf() | {"dtype": model.dtype}, arrays, companions or {})


def _write(dst: Path, config: dict[str, Any], arrays: dict[str, HostArray], companions: Mapping[str, Path]) -> None:
    _refuse_existing(dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dst.name}.", dir=dst.parent) as scratch:
        part = Path(scratch) / "checkpoint"
        part.mkdir()
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name, file in companions.items():
            shutil.copyfile(file, part / name)
        write_params(part, arrays)
        part.rename(dst)


def _refuse_existing(dst: Path) -> None:
    if dst.exists():
        raise AlreadyExists(f"{dst}: exists; give the path of a new directory")
