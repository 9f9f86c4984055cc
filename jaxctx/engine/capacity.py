"""Capacity: how many pages of KV fit beside the model."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from jaxctx.model.interface import KVSpec

CPU_SHARE = 0.25  # of physical memory, at most: a server on a desk is not alone
ACCELERATOR_SHARE = 0.9  # of what is free once the weights are there; the rest is for the step's temporaries


def page_bytes(spec: KVSpec, page_size: int) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in all layers."""
    arrays = 1 if spec.dtype == "uint32" else 2
    return arrays * spec.layers * spec.kv_heads * spec.head_dim * page_size * jnp.dtype(spec.dtype).itemsize


def pages_in_host_memory(spec: KVSpec, page_size: int) -> int:
    """Pages that fit into a fair share of physical memory."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SHARE) // page_bytes(spec, page_size)


def pages_that_fit(
    spec: KVSpec, page_size: int, *, wanted_tokens: int, memory_fraction: float | None = None, devices: int = 1
) -> int:
    """Pages for `wanted_tokens`, or as many as fit into the share of free memory; at least one.

    `memory_fraction` replaces the default share, and then all of it is used however many tokens that makes. Free
    memory is what the first device reports; a CPU reports none, there it is physical memory. `devices` share a page.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        share = ACCELERATOR_SHARE
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = CPU_SHARE / devices  # fake ones, of one memory
    fitting = (
        int(free * (share if memory_fraction is None else memory_fraction)) * devices // page_bytes(spec, page_size)
    )
    wanted = -(-wanted_tokens // page_size)
    return max(1, fitting if memory_fraction is not None else min(wanted, fitting))
