"""Read an adapter: a directory that PEFT's `save_pretrained` wrote, compared with the model that it is for.

A directory means what it means to PEFT: `W x` becomes `W x + scale * B A x`, the scale being `lora_alpha / r`, or
`lora_alpha / sqrt(r)` with `use_rslora`, for each matrix that has tensors in the file. Whatever else PEFT would do is
refused by name, before the tensors are read: DoRA, biases, other modules that were trained, a changed base model.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from jaxctx.model.config import DTYPES, AdapterSlots
from jaxctx.model.config_reader import CheckpointError, Reader, read_json, shown
from jaxctx.model.families.family import TensorPart
from jaxctx.model.functional import DecoderModel
from jaxctx.model.registry import FAMILIES
from jaxctx.model.stored_tensor import NUMPY_DTYPES, StoredTensor
from jaxctx.model.weights.formats import open_safetensors, read_headers
from jaxctx.model.weights.load import check_finite
from jaxctx.model.weights.parts import parameter_parts

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every module in a file of PEFT
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
LARGEST_RANK = 4096
LARGEST_ALPHA = 1e6
MOST_NAMES = 1 << 16
"""Entries of a list of modules or layers, or of patterns: more than models have matrices."""

FIELDS = frozenset(
    {
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
"""The keys that are understood."""

IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",  # the tensors say what is changed
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",  # means nothing without use_qalora
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Keys that change nothing of what a finished adapter computes."""

WITHOUT_SLOTS = ("lm_head", "model.embed_tokens")
"""Modules of every model that PEFT can change, and adapters here cannot."""

KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is. The others train beside changed weights."""

LITERAL = re.compile(r"\^?[\w.-]+")
"""Patterns of ranks and alphas that mean the same as a name. What else a regular expression may do is refused."""


class LowRankChange(NamedTuple):
    """How an adapter changes a matrix: `x @ a.T @ b.T` is added, the scale being in `b`. In the model's type."""

    a: npt.NDArray[Any]  # [rank, in]
    b: npt.NDArray[Any]  # [out, rank]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in the host's memory.

    `content_hash` is a digest of every number as loaded and of the matrices that they change: equal hashes compute the
    same, whatever the adapters are called.
    """

    content_hash: str
    rank: int  # the largest of its matrices'
    changes: Mapping[str, LowRankChange]  # by the name of the parameter that is changed: "model.….q_proj.weight"

    @property
    def parameters(self) -> int:
        """Numbers in all its matrices."""
        return sum(change.a.size + change.b.size for change in self.changes.values())


Patterns = Mapping[str, tuple[int, float]]
"""Name of modules → the place in the file, as the first that names a module counts, and the rank or alpha."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the configuration says, in a form that is asked in no time, however long its lists are."""

    rank: int
    alpha: float
    ranks: Patterns
    alphas: Patterns
    use_rslora: bool
    targets: frozenset[str] | None  # names of modules; None: a regular expression, or a word for many
    layers: frozenset[int] | None  # numbers of the layers that are changed; None: any

    def rank_of(self, module: str) -> int:
        """The rank of the module's matrices."""
        return int(_value_of(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B A is multiplied with."""
        alpha, rank = _value_of(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


class _Target(NamedTuple):
    """A parameter that adapters may change, and the rows that it is of the module in a checkpoint; None: all."""

    parameter: str
    shape: tuple[int, int]  # [out, in]
    rows: tuple[int, int] | None


def read_adapter(path: str | Path, model: DecoderModel) -> Adapter:
    """The adapter in a PEFT directory, for a model that has slots for adapters.

    Raises CheckpointError naming the file and the key or tensor, before tensors are read if the headers already tell.
    """
    directory = Path(path)
    slots = model.adapter_slots
    assert slots is not None
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {'not a directory' if directory.exists() else 'does not exist'}")
    read = Reader(read_json(directory / CONFIG), CONFIG)
    settings = _read_settings(read)
    if not (directory / TENSORS).exists() and (directory / "adapter_model.bin").exists():
        raise CheckpointError(
            "adapter_model.bin: pickled weights are not read, because loading them can run code; "
            "save the adapter as safetensors (save_pretrained(..., safe_serialization=True))"
        )
    with open_safetensors(directory, TENSORS) as data:
        headers = read_headers(data, TENSORS)
        targets = _targets(model)
        modules = _modules(headers, model.config.architecture)
        for module in modules:
            _check_module(read, settings, headers, module, targets, slots)
        _check_targets(read, settings, modules, targets)
        changes: dict[str, LowRankChange] = {}
        for module in modules:
            a, b = (data.get_tensor(PREFIX + module + suffix) for suffix in (LORA_A, LORA_B))
            found = _changes(module, a, b, settings.scale_of(module), targets[module], model.dtype)
            if twice := changes.keys() & found.keys():
                raise CheckpointError(f"{TENSORS}: {module}: changes {min(twice)}, as another module does")
            changes |= found
    return Adapter(_digest(changes), max(change.a.shape[0] for change in changes.values()), changes)


def _read_settings(read: Reader) -> _Settings:
    """Raises CheckpointError for what the configuration says and is not computed here."""
    if read.get("peft_type") != "LORA":
        read.refuse("peft_type", f"must be LORA, not {shown(read.get('peft_type'))}")
    rank, alpha = _rank(read, "r", read.get("r")), _alpha(read, "lora_alpha", read.get("lora_alpha"))
    use_rslora = read.flag("use_rslora")
    if read.get("bias") not in (None, "none"):
        read.refuse("bias", f"must be none, not {shown(read.get('bias'))}: trained biases are not supported")
    if read.get("init_lora_weights") not in KEEPS_BASE:
        why = "changes the base model; convert the adapter (path_initial_model_for_weight_conversion)"
        read.refuse("init_lora_weights", f"{shown(read.get('init_lora_weights'))} {why}")
    settings = _Settings(
        rank=rank,
        alpha=alpha,
        ranks=_patterns(read, "rank_pattern", _rank),
        alphas=_patterns(read, "alpha_pattern", _alpha),
        use_rslora=use_rslora,
        targets=_target_names(read),
        layers=_layers(read),
    )
    for key, value in read.raw.items():
        if key not in FIELDS | IGNORED and value not in (None, False, 0, "", [], {}):
            read.refuse(key, f"{shown(value)} is not supported")
    return settings


def _patterns(read: Reader, key: str, read_value: Callable[[Reader, str, Any], float]) -> Patterns:
    patterns: dict[str, tuple[int, float]] = {}
    raw = read.inner(key).raw
    _check_length(read, key, raw)
    for place, (pattern, value) in enumerate(raw.items()):
        if LITERAL.fullmatch(pattern) is None:
            read.refuse(key, f"{shown(pattern)} is no name of a module; regular expressions are not supported")
        patterns[pattern] = place, read_value(read, f"{key}.{pattern}", value)
    return patterns


def _target_names(read: Reader) -> frozenset[str] | None:
    targets = read.get("target_modules")
    if isinstance(targets, str):
        return None
    if isinstance(targets, list):
        _check_length(read, "target_modules", targets)
        if all(isinstance(target, str) for target in targets):
            return frozenset(targets)
    read.refuse("target_modules", f"must be names of modules, not {shown(targets)}")


def _layers(read: Reader) -> frozenset[int] | None:
    """An empty list means all, as in PEFT."""
    key = "layers_to_transform"
    value = read.get(key)
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    _check_length(read, key, layers)
    if not all(type(layer) is int for layer in layers):
        read.refuse(key, f"must be numbers of layers, not {shown(value)}")
    return frozenset(layers) or None


def _check_length(read: Reader, key: str, found: Collection[object]) -> None:
    if len(found) > MOST_NAMES:
        read.refuse(key, f"has {len(found):,} entries, more than {MOST_NAMES:,}")


def _rank(read: Reader, key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= LARGEST_RANK:
        read.refuse(key, f"must be an integer from 1 to {LARGEST_RANK}, not {shown(value)}")
    return value


def _alpha(read: Reader, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_ALPHA:
        read.refuse(key, f"must be a number above 0, up to {LARGEST_ALPHA:g}, not {shown(value)}")
    return float(value)


def _targets(model: DecoderModel) -> dict[str, list[_Target]]:
    """Module of the checkpoint → the parameters that are in it, of those that adapters may change."""
    parts = parameter_parts(model, as_published=True)
    with_slots = {spec.name.removesuffix("lora_a") for spec in model.specs if spec.name.endswith(".lora_a")}
    targets: dict[str, list[_Target]] = {}
    for spec in model.specs:
        if spec.name.removesuffix("weight") not in with_slots or len(parts[spec.name]) != 1:
            continue
        part: TensorPart = parts[spec.name][0]
        out, inside = spec.stored_shape
        module = part.tensor.removesuffix(".weight")
        targets.setdefault(module, []).append(_Target(spec.name, (out, inside), part.rows))
    in_memory = {_name_in_memory(module): found for module, found in targets.items()}
    return targets | in_memory


def _name_in_memory(module: str) -> str:
    """What transformers calls a module of published files once it is loaded, which is the name that PEFT writes.

    They differ where the model also takes images.
    """
    within = module.removeprefix("language_model.model.")
    return module if within == module else f"model.language_model.{within}"


def _modules(headers: Mapping[str, StoredTensor], architecture: str) -> list[str]:
    """The modules that have tensors, in the order of their names, without those that read images.

    Whoever trains `all-linear` of a model that takes images has changes of these too. Of text they change nothing.
    Raises CheckpointError for tensors of anything else, and if no module is left.
    """
    unread = FAMILIES[architecture].unread
    modules: set[str] = set()
    for name in headers:
        suffix = next((suffix for suffix in (LORA_A, LORA_B) if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(PREFIX):
            raise CheckpointError(
                f"{TENSORS}: {name}: unexpected; supported are tensors {PREFIX}MODULE{LORA_A} and …{LORA_B}"
            )
        modules.add(name.removeprefix(PREFIX).removesuffix(suffix))
    if not modules:
        raise CheckpointError(f"{TENSORS}: no tensors")
    read = [module for module in sorted(modules) if not module.removeprefix("model.").startswith(unread)]
    if not read:
        raise CheckpointError(f"{TENSORS}: only tensors of modules that read images, which are not served")
    return read


def _check_module(
    read: Reader,
    settings: _Settings,
    headers: Mapping[str, StoredTensor],
    module: str,
    targets: Mapping[str, list[_Target]],
    slots: AdapterSlots,
) -> None:
    """Raises CheckpointError unless the module's tensors are whole, and fit to the model and the configuration."""
    if module not in targets:
        raise CheckpointError(
            f"{TENSORS}: {module}: no matrix of this model that an adapter may change: these are the query, key, "
            "value and output projections and the feed-forward of its layers"
        )
    rank = settings.rank_of(module)
    rows = sum(target.shape[0] for target in targets[module])
    shapes = {LORA_A: (rank, targets[module][0].shape[1]), LORA_B: (rows, rank)}
    for suffix, shape in shapes.items():
        name = PREFIX + module + suffix
        stored = headers.get(name)
        if stored is None:
            raise CheckpointError(f"{TENSORS}: {name}: missing, shape {list(shape)} expected")
        if stored.shape != shape:
            raise CheckpointError(
                f"{TENSORS}: {name}: shape {list(stored.shape)}, but the model and {CONFIG} say {list(shape)}"
            )
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{TENSORS}: {name}: type {stored.dtype} is not one of {', '.join(DTYPES)}")
    if rank > slots.rank:
        read.refuse("r", f"{module} has rank {rank}; this server takes adapters of rank {slots.rank} at most")
    if settings.layers is not None and _layer_of(module) not in settings.layers:
        layers = shown(read.get("layers_to_transform"))
        raise CheckpointError(f"{TENSORS}: {module}: not in layers_to_transform of {CONFIG}, {layers}")


def _check_targets(read: Reader, settings: _Settings, modules: list[str], targets: Collection[str]) -> None:
    """Raises CheckpointError if the configuration promises changes that are not there, or others are.

    `targets` are the modules that an adapter may change. Names of other modules change nothing: lists are often written
    for many models. `target_modules` may be a regular expression; then what is there counts.
    """
    if settings.targets is not None:
        of_model = _names_of_all((*targets, *WITHOUT_SLOTS))
        promised = settings.targets & of_model
        if missing := promised - _names_of_all(modules):
            read.refuse("target_modules", f"{shown(min(missing))} has no tensors in {TENSORS}")
        for module in modules:
            if settings.targets.isdisjoint(_names_of(module)):
                names = shown(read.get("target_modules"))
                raise CheckpointError(f"{TENSORS}: {module}: not in target_modules of {CONFIG}, {names}")
    there = {_layer_of(module) for module in modules}
    without = () if settings.layers is None else [layer for layer in settings.layers if layer not in there]
    if without:
        read.refuse("layers_to_transform", f"layer {min(without)} has no tensors in {TENSORS}")


def _names_of(module: str) -> frozenset[str]:
    """The names that mean the module: its own, what it ends with behind a dot, and with ^ in front the whole."""
    parts = module.split(".")
    return frozenset((f"^{module}", *(".".join(parts[start:]) for start in range(len(parts)))))


def _names_of_all(modules: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*map(_names_of, modules))


def _value_of(patterns: Patterns, module: str, otherwise: float) -> float:
    """What the first pattern that names the module says of it."""
    found = [patterns[name] for name in _names_of(module) if name in patterns]
    return min(found)[1] if found else otherwise


def _layer_of(module: str) -> int | None:
    """The number of the layer that the module is in; None: it is in none."""
    numbers = [int(part) for part in module.split(".") if part.isdecimal()]
    return numbers[0] if numbers else None


def _changes(
    module: str, a: npt.NDArray[Any], b: npt.NDArray[Any], scale: float, targets: list[_Target], dtype: str
) -> dict[str, LowRankChange]:
    """The change of each parameter that is in the module, with numbers as `dtype`. Raises CheckpointError for NaN."""
    for tensor, suffix in ((a, LORA_A), (b, LORA_B)):
        check_finite(tensor, TENSORS, PREFIX + module + suffix)
    with np.errstate(over="ignore"):  # what overflows is found next
        scaled = (b.astype(np.float32) * np.float32(scale)).astype(NUMPY_DTYPES[dtype])
        narrow = a.astype(NUMPY_DTYPES[dtype])
    for tensor, suffix in ((narrow, LORA_A), (scaled, LORA_B)):
        check_finite(tensor, TENSORS, PREFIX + module + suffix)
    return {
        target.parameter: LowRankChange(narrow, scaled if target.rows is None else scaled[slice(*target.rows)])
        for target in targets
    }


def _digest(changes: Mapping[str, LowRankChange]) -> str:
    """128 bits in hex."""
    digest = xxhash.xxh3_128()
    for name in sorted(changes):
        for array in changes[name]:
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return str(digest.hexdigest())
