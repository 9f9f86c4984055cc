"""From a server's settings to the engine's: sizes, pages, tiers. Nothing is loaded, allocated or compiled here."""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxctx.engine.config import ACCELERATOR_SHARE, CPU_SHARE, EngineConfig, pages_in_host_memory
from jaxctx.engine.default_sizes import ModelMemory, Sizes, SizeSettings, sizes_to_try
from jaxctx.errors import InvalidArgument
from jaxctx.model.interface import Model, Params
from jaxctx.model.sharding import GROUP, kv_parts
from jaxctx_server.config import ServeConfig

OUTPUT_TOKENS, BUNDLED_OUTPUT_TOKENS = 4096, 256  # of a request that does not say how many


def params_bytes(params: Params) -> int:
    """What the weights take, each once."""
    return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(params))


def model_memory(
    config: ServeConfig, model: Model, params: Params, place: Mesh | jax.Device, platform: str, memory: int
) -> ModelMemory:
    """What is known before anything is compiled, for chips of `memory` bytes each."""
    mesh = place if isinstance(place, Mesh) else None
    chips, holders = (1, 1) if mesh is None else (mesh.size, mesh.shape[GROUP])
    return ModelMemory(
        memory_bytes=memory * chips,
        weights_bytes=params_bytes(params),
        devices=chips,
        page_holders=holders,
        page_parts=kv_parts(mesh),
        platform=platform,
        vocab_size=model.vocab_size,
        kv=model.kv,
        longest=_longest(config, model),
        share=config.memory_fraction or (CPU_SHARE if platform == "cpu" else ACCELERATOR_SHARE),
        kv_tokens=config.kv_tokens,
    )


def choices_of_sizes(config: ServeConfig, platform: str, known: ModelMemory) -> tuple[Sizes, ...]:
    """Sizes, the largest first: those to take unless they are measured to be too large.

    If the configuration sets the number of pages there is one choice, as a server measures nothing then.
    """
    settings = SizeSettings(
        page_size=config.page_size, max_batch=config.max_batch, max_batch_tokens=config.max_batch_tokens
    )
    choices = sizes_to_try(platform, settings, known)
    return choices if config.kv_tokens is None else choices[:1]


def config_to_measure(
    config: ServeConfig, model: Model, sizes: Sizes, known: ModelMemory, platform: str
) -> EngineConfig:
    """With half of the pages that could fit at most."""
    largest = largest_config(config, model, sizes, known, platform)
    return replace(largest, pages=-(-largest.pages // 2))


def largest_config(config: ServeConfig, model: Model, sizes: Sizes, known: ModelMemory, platform: str) -> EngineConfig:
    """With as many pages as there is memory for beside weights and running requests, at most."""
    least = -(-(config.max_context_tokens or 0) // sizes.page_size)  # so that the plan says how much is missing
    fitting = known.left_bytes(sizes.max_batch) // known.page_bytes(sizes.page_size)
    return engine_config(config, model, sizes, max(least, fitting), platform, known.page_parts)


def _longest(config: ServeConfig, model: Model) -> int:
    """Tokens of the longest context, as far as settings and model decide. Raises InvalidArgument."""
    longest = config.max_context_tokens or model.max_positions
    if longest > model.max_positions:
        reason = model.context_reason(model.max_positions)
        why = f", {reason}" if reason else ""
        raise InvalidArgument.field("max_context_tokens", f"the model has {model.max_positions} positions{why}")
    return longest


def engine_config(
    config: ServeConfig, model: Model, sizes: Sizes, fitting: int, platform: str, page_parts: int = 1
) -> EngineConfig:
    """The engine's configuration. Its KV is what the configuration says, else what `max_batch` contexts of full length
    take, up to the pages that fit. `page_parts`: over how many devices the KV heads of a page are split.
    """
    longest, page_size = _longest(config, model), sizes.page_size
    wanted = fitting if config.memory_fraction is not None else -(-sizes.max_batch * longest // page_size)
    pages = max(1, min(wanted, fitting))
    if config.kv_tokens is not None:
        pages = -(-config.kv_tokens // page_size)
    capacity = pages * page_size
    if (config.max_context_tokens or 0) > capacity:
        raise InvalidArgument.field("max_context_tokens", f"there are only {capacity} tokens of KV")
    host_pages, host_reason = _host_tier(config, model, page_size, pages, platform, page_parts)
    max_context_tokens = min(longest, capacity)
    return EngineConfig(
        pages=pages,
        page_size=page_size,
        max_batch=sizes.max_batch,
        max_batch_tokens=sizes.max_batch_tokens,
        sizes_reason=sizes.reason,
        max_context_tokens=max_context_tokens,
        context_reason=model.context_reason(max_context_tokens),
        queue_limit=config.queue_limit,
        max_contexts_per_tenant=config.max_contexts_per_tenant,
        max_snapshots_per_tenant=config.max_snapshots_per_tenant,
        max_snapshot_bytes_per_tenant=config.max_snapshot_bytes_per_tenant,
        snapshot_history=config.snapshot_history,
        pinned_pages_per_tenant=None if config.pinned_tokens is None else config.pinned_tokens // page_size,
        default_max_tokens=_default_max_tokens(config),
        draft_tokens=config.draft_tokens,
        host_pages=host_pages,
        host_reason=host_reason,
        disk_pages=_disk_pages(config, page_size),
        disk_file=config.disk_file,
        moving_pages=sizes.moving_pages,
    )


def _default_max_tokens(config: ServeConfig) -> int:
    """The longest output of a request that does not say: agents do not, and take an answer that is cut for an error."""
    if config.default_max_tokens is not None:
        return config.default_max_tokens
    return BUNDLED_OUTPUT_TOKENS if config.model is None else OUTPUT_TOKENS


def _host_tier(
    config: ServeConfig, model: Model, page_size: int, pages: int, platform: str, page_parts: int
) -> tuple[int, str]:
    """Pages of the host tier, and in words why so many. `pages`: those of the device. `page_parts`: as of the engine.

    On a CPU the device's memory is the host's, so that this tier gains nothing, unless pages go on to a disk: then it
    is as large as the disk tier, up to what fits.
    """
    if config.host_tokens is not None:
        if 0 < config.host_tokens < 2 * page_size:
            raise InvalidArgument.field("host_tokens", f"must be 0, or at least two pages, of {page_size} tokens")
        return config.host_tokens // page_size, "as set"
    reason = "as many as on the device"
    if platform == "cpu":
        if not config.disk_tokens:
            return 0, ""
        disk_pages = config.disk_tokens // page_size
        if disk_pages < pages:
            pages, reason = disk_pages, "as many as on the disk"
    fitting = pages_in_host_memory(model.kv, page_size, platform=platform, parts=page_parts)
    if fitting < pages:
        pages, reason = fitting, f"what fits into {CPU_SHARE:.0%} of the machine's memory"
    return max(2, pages), reason


def _disk_pages(config: ServeConfig, page_size: int) -> int:
    """Pages of the disk tier."""
    if 0 < config.disk_tokens < page_size:
        raise InvalidArgument.field("disk_tokens", f"must be 0, or at least a page, of {page_size} tokens")
    return config.disk_tokens // page_size
