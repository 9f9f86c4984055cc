"""Times the attention reference on this machine, against plain gathered attention in the same run.

One layer of the bench model (4 KV heads of 128, two query heads each, pages of 16 tokens, bfloat16). Every case runs in
turn through the plan and `attend`, and through what one writes without a plan: gather each sequence's pages and attend
to them, sequence by sequence. Several rounds; medians of wall and processor time, the spread of the wall times, and
the host time of planning. On a busy machine trust the processor times.

    python scripts/bench_attention.py [--rounds 9] [--only decode] [--scattered]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx_kernels import (
    PlanShape,
    Segment,
    attend,
    plan_attention,
    plan_shape,
    pool_array,
    unpack,
    write_rows,
)

KV_HEADS, GROUP, DIM, PAGE, POOL = 4, 2, 128, 16, 3000


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    segments: list[Segment]


def cases(pages: np.ndarray) -> list[Case]:
    """The shapes of `scripts/bench`'s scenarios. `pages` are dealt out from the front, so a sorted list gives runs."""

    def shared(prefix: int, own: int) -> Callable[[int], np.ndarray]:
        return lambda i: np.concatenate([pages[:prefix], pages[prefix + i * own : prefix + (i + 1) * own]])

    def decode(name: str, count: int, tokens: int, of: Callable[[int], np.ndarray]) -> Case:
        return Case(name, max(4, count), [Segment(i, 1, tokens - 1, of(i)) for i in range(count)])

    chunk = [Segment(0, 448, 0, pages[:32])]
    return [
        decode("decode 1 at 2112", 1, 2112, shared(0, 132)),
        decode("decode 8 at 192", 8, 192, shared(0, 12)),
        decode("decode 16 at 192", 16, 192, shared(0, 12)),
        decode("decode 16 at 2112", 16, 2112, shared(0, 132)),
        decode("fanout 16 off 2048", 16, 2112, shared(128, 4)),
        decode("fanout 32 off 8192", 32, 8256, shared(512, 4)),
        Case("prefill 512 at 0", 512, [Segment(0, 512, 0, pages[:32])]),
        Case("prefill 512 at 512", 512, [Segment(0, 512, 512, pages[:64])]),
        Case("prefill 128 at 2048", 128, [Segment(0, 128, 2048, pages[:136])]),
        Case(
            "prefill 448 + decode 15",
            512,
            chunk + [Segment(448 + i, 1, 499, pages[32 * i : 32 * i + 32]) for i in range(1, 16)],
        ),
    ]


@partial(jax.jit, static_argnames="shape")
def planned(q: jax.Array, k: jax.Array, v: jax.Array, packed: jax.Array, *, shape: PlanShape) -> jax.Array:
    return attend(q, k, v, unpack(shape, packed), shape=shape)


@jax.jit
def plain(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array) -> jax.Array:
    """q `[sequences, rows, heads, dim]`, tables `[sequences, pages]`, positions `[sequences, rows]`, bfloat16."""

    def sequence(a: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, table, position = a
        rows = q.shape[0]
        k_, v_ = (
            jax.lax.bitcast_convert_type(pool[:, table], jnp.bfloat16).reshape(KV_HEADS, -1, DIM) for pool in (k, v)
        )
        q = q.reshape(rows, KV_HEADS, GROUP, DIM).transpose(1, 0, 2, 3).reshape(KV_HEADS, rows * GROUP, DIM)
        score = jnp.einsum("hmd,hsd->hms", q, k_, preferred_element_type=jnp.float32) * DIM**-0.5
        score = jnp.where(jnp.arange(k_.shape[1]) <= jnp.repeat(position, GROUP)[:, None], score, -jnp.inf)
        weight = jax.nn.softmax(score).astype(jnp.bfloat16)
        out = jnp.einsum("hms,hsd->hmd", weight, v_, preferred_element_type=jnp.float32)
        return out.reshape(KV_HEADS, rows, GROUP, DIM).transpose(1, 0, 2, 3).reshape(rows, -1, DIM)

    return jax.lax.map(sequence, (q, tables, positions))


def plain_arguments(q: np.ndarray, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences padded to the longest page table, and a prompt chunk as its own sequence beside padded decode rows."""
    rows = max(s.rows for s in segments)
    length = max(-(-(s.position + s.rows) // PAGE) for s in segments)
    queries = np.zeros((len(segments), rows, KV_HEADS * GROUP, DIM), q.dtype)
    tables = np.zeros((len(segments), length), np.int32)
    positions = np.zeros((len(segments), rows), np.int32)
    for i, s in enumerate(segments):
        queries[i, : s.rows] = q[s.first_row : s.first_row + s.rows]
        tables[i, : min(length, len(s.pages))] = s.pages[:length]
        positions[i, : s.rows] = s.position + np.arange(s.rows)
    return queries, tables, positions


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor milliseconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


def run(case: Case, k: jax.Array, v: jax.Array, rng: np.random.Generator, rounds: int) -> None:
    """Time one case both ways in turn and print a line; the two results must agree."""
    shape = plan_shape(case.rows, PAGE, 8320, POOL)
    packed = np.empty(shape.size(), np.int32)
    plan_attention(case.segments, shape, packed)
    ends, *_, table, _ = unpack(shape, packed)
    items = table[:, : ends[-1]]
    read = (items[2] + -(-items[3] // PAGE)).max()  # entries of the page list
    seen = sum(-(-(s.position + s.rows) // PAGE) for s in case.segments)
    q = np.asarray(jnp.asarray(rng.normal(size=(case.rows, KV_HEADS * GROUP, DIM)), jnp.bfloat16))
    mixed = len({s.rows for s in case.segments}) > 1
    parts = [[s for s in case.segments if (s.rows > 1) == wide] for wide in (True, False)] if mixed else [case.segments]
    arguments = [jax.device_put(plain_arguments(q, part)) for part in parts]
    ours: Callable[[], jax.Array] = lambda: planned(q, k, v, packed, shape=shape)  # noqa: E731
    theirs: Callable[[], list[jax.Array]] = lambda: [plain(a[0], k, v, *a[1:]) for a in arguments]  # noqa: E731
    got = np.asarray(ours())
    for part, result in zip(parts, theirs(), strict=True):
        for s, rows in zip(part, np.asarray(result), strict=True):
            np.testing.assert_allclose(got[s.first_row : s.first_row + s.rows], rows[: s.rows], atol=0.03)
    samples = np.array([(*timed(ours), *timed(theirs)) for _ in range(rounds)])
    plans = [timed(lambda: plan_attention(case.segments, shape, packed))[0] * 1e3 for _ in range(rounds)]
    wall, processor, plain_wall, plain_processor = np.median(samples, axis=0)
    print(
        f"{case.name:24} {items.shape[1]:5} {read:6} {seen:6} {np.median(plans):6.0f} "
        f"{wall:9.2f} [{samples[:, 0].min():7.2f} {samples[:, 0].max():7.2f}] {processor:8.2f} "
        f"{plain_wall:10.2f} [{samples[:, 2].min():7.2f} {samples[:, 2].max():7.2f}] {plain_processor:8.2f} "
        f"{plain_wall / wall:6.2f}x {plain_processor / processor:6.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--scattered", action="store_true", help="pages in random order instead of consecutive ones")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    slots = jnp.arange(POOL * PAGE)
    k, v = (
        write_rows(pool_array(KV_HEADS, POOL, PAGE, DIM, "bfloat16"), jnp.asarray(values, jnp.bfloat16), slots)
        for values in rng.normal(size=(2, POOL * PAGE, KV_HEADS, DIM)).astype(np.float32)
    )
    pages = np.arange(1, POOL, dtype=np.int32)
    pages = rng.permutation(pages) if options.scattered else pages
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, n = {options.rounds}, times in ms, plan in µs")
    print(f"{'':24} items   read   seen   plan    planned [    min     max]      cpu", end="")
    print("      plain [    min     max]      cpu  wall ×  cpu ×")
    for case in cases(pages):
        if options.only in case.name:
            run(case, k, v, rng, options.rounds)


if __name__ == "__main__":
    main()
