"""How things are timed on a device: in rounds, everything in turn; what disturbs one disturbs its ceilings as well.

Used by `timing` and by the benchmark of the kernels; never by an engine.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

COPY, PRODUCT = "copy", "product"  # the ceilings


@dataclass(frozen=True, slots=True)
class Work:
    """Something to time. One `call` dispatches `parts` of it, each of which must read and compute so much."""

    name: str
    call: Callable[[], object]  # returns the arrays to wait for
    read_bytes: float  # that a part has to read at the least; of a copy, reads and writes
    flops: float
    parts: int = 1


def timed(work: Work, calls: int) -> float:
    """Seconds of a part. The calls are queued one after another, so that the host's part in them is hidden."""
    begin = time.perf_counter()
    for _ in range(calls):
        result = work.call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / (calls * work.parts)


def measure(
    works: Sequence[Work], rounds: int, least_s: float, progress: Callable[[str], None] = lambda _: None
) -> Mapping[str, list[float]]:
    """Seconds of a part of everything, in every round. Repeats calls until a measure takes `least_s` or so."""
    calls: dict[str, int] = {}
    for work in works:
        progress(f"compiling: {work.name}")
        timed(work, 1)
        calls[work.name] = max(1, math.ceil(least_s / (timed(work, 1) * work.parts)))
    seconds: dict[str, list[float]] = {work.name: [] for work in works}
    assert len(seconds) == len(works), "two works have one name"
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for work in works:
            seconds[work.name].append(timed(work, calls[work.name]))
    return seconds


def ceilings(copy_bytes: int, product_size: int) -> list[Work]:
    """A copy of so many bytes, and the product of two square bfloat16 matrices, accumulated in float32."""
    source = jnp.arange(copy_bytes // 4, dtype=jnp.uint32)
    shape = (product_size, product_size)
    a, b = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    # Not the identity, which XLA would leave out; into an old copy's memory, as new memory costs more than copying.
    into = jax.jit(lambda old, x: ~x, donate_argnums=0, keep_unused=True)
    kept = [jnp.zeros_like(source)]

    def copy() -> jax.Array:
        kept.append(into(kept.pop(), source))
        return kept[0]

    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    return [
        Work(COPY, copy, 2 * source.nbytes, 0),
        Work(PRODUCT, lambda: product(a, b), 3 * a.nbytes, 2 * product_size**3),
    ]
