"""Write Orbax checkpoints: from another checkpoint or from parameters just trained."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxctx.errors import AlreadyExists
from jaxctx.model.config_reader import read_json
from jaxctx.model.quantization.config import FIELD, OLDER_FIELD
from jaxctx.model.text.load import TEMPLATE_DIRECTORY
from jaxctx.model.weights.formats import CONFIG, PARAMS, HostArray
from jaxctx.model.weights.load import Progress, check_memory, open_checked, read_cast

# What belongs to a model besides its weights. Only these names are copied, and templates; only plain files.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "NOTICE",
    "README.md",
)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint directory `src` as an Orbax one at `dst`, which appears whole or not at all.

    `dtype` and `weights_dtype` as for `load_model`, which gives both directories the same revision. Weights of 8 bits
    are stored as `…weight` and `…weight_scale`. Holds the parameters in host memory, whatever device there is.
    Raises CheckpointError for a bad `src`, and if the parameters do not fit into that memory; AlreadyExists if `dst` is
    there.
    """
    directory = Path(src)
    source, model = open_checked(directory, dtype, weights_dtype=weights_dtype)
    _refuse_existing(Path(dst))
    check_memory(source, model)
    arrays = {spec.name: data for spec, data in read_cast(source, model, progress)}
    left_out = ("torch_dtype", FIELD, OLDER_FIELD)  # of which the first is `dtype`, and the others are no longer so
    raw = {key: value for key, value in read_json(directory / CONFIG).items() if key not in left_out}
    templates = (f"{TEMPLATE_DIRECTORY}/{file.name}" for file in (directory / TEMPLATE_DIRECTORY).glob("*.jinja"))
    companions = {name: directory / name for name in (*COMPANIONS, *templates) if (directory / name).is_file()}
    write_orbax(Path(dst), raw | {"dtype": model.dtype}, arrays, companions)


def write_orbax(
    dst: Path, config: Mapping[str, Any], arrays: Mapping[str, HostArray], companions: Mapping[str, Path]
) -> None:
    """Write an Orbax directory: `config.json`, parameters by their names, and copies of `companions` (path → file).

    Raises AlreadyExists if `dst` is there.
    """
    import orbax.checkpoint as ocp  # here, as it takes a fifth of a second, which a server's start would pay

    _refuse_existing(dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dst.name}.", dir=dst.parent) as scratch:
        part = Path(scratch).absolute() / "checkpoint"
        part.mkdir()
        (part / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
        for name, file in companions.items():
            (part / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, part / name)
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(part / PARAMS, args=ocp.args.PyTreeSave(dict(arrays)))
        # Orbax's receipt names the directory of this machine that it was written to; nothing reads it.
        (part / PARAMS / "commit_success.txt").unlink(missing_ok=True)
        part.rename(dst)


def _refuse_existing(dst: Path) -> None:
    if dst.exists():
        raise AlreadyExists(f"{dst}: exists; give the path of a new directory")
