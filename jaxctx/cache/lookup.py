"""Lookup: what a path through the page tree comes to, over all tiers. Called by `contexts` only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.cache.prefix import NOWHERE, PageNode
from jaxctx.cache.tiers import Item


@dataclass(frozen=True, slots=True)
class Found:
    """Pages that a context would find: on the device, `unheld` of them by nobody held, and behind these elsewhere."""

    device: int
    unheld: int
    host: int
    disk: int


def on_device(path: Sequence[Item]) -> int:
    """How many pages at the front of a path are on the device."""
    return next((count for count, item in enumerate(path) if item.page == NOWHERE), len(path))


def found(path: Sequence[Item]) -> Found:
    device = on_device(path)
    host = sum(item.host != NOWHERE for item in path[device:])
    unheld = sum(isinstance(item, PageNode) and item.holders == 0 for item in path[:device])
    return Found(device, unheld, host, len(path) - device - host)
