"""Collectives, read from HLO: of text as compilers for TPUs and GPUs write it, and of a real compilation."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxctx.engine.plan.collectives import Collective, find_collectives

HLO = """HloModule jit_step, is_scheduled=true

%add.1 (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %add = bf16[] add(%x, %y)
}

%branch.2 (p: f32[16]) -> f32[16] {
  %all-gather.3 = (s32[16,4]{0,1}, f32[16,4]{0,1}) all-gather(%a, %b), dimensions={1}
  ROOT %r = f32[16]{0} all-reduce(%p), to_apply=%add.1
}

%body.3 (p: f32[16]) -> f32[16] {
  ROOT %r = f32[16]{0:T(128)S(1)} all-reduce(%p), to_apply=%add.1
}

%called.4 (p: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-reduce(%p), to_apply=%add.1
}

ENTRY %main.5 (p: bf16[16,1024]) -> bf16[16,1024] {
  %psum.1 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} all-reduce(%p), replica_groups=mesh['kv'=2], to_apply=%add.1
  %all-reduce-start.1 = ((bf16[16,1024]{1,0}), bf16[16,1024]{1,0}) all-reduce-start(%psum.1), to_apply=%add.1
  %all-reduce-done.1 = bf16[16,1024]{1,0} all-reduce-done(%all-reduce-start.1)
  %call.1 = f32[8]{0} call(%c), to_apply=%called.4
  %loop = f32[16]{0} while(%q), condition=%add.1, body=%body.3
  %all-reduced = f32[4]{0} fusion(%psum.1), kind=kLoop, calls=%add.1
  ROOT %c.1 = f32[16]{0} conditional(%i, %q, %q), branch_computations={%branch.2, %add.1}
}
"""


def test_what_always_runs_and_what_may() -> None:
    assert set(find_collectives(HLO)) == {
        Collective("all-reduce", "bf16", 32768, True),
        Collective("all-reduce", "f32", 32, True),
        Collective("all-reduce", "f32", 64, False),
        Collective("all-gather", "s32", 512, False),
    }
    assert len([each for each in find_collectives(HLO) if each.dtype == "bf16"]) == 2  # one is under way for a while
    assert len(find_collectives(HLO)) == 6


def test_of_a_compiled_function() -> None:
    mesh = jax.make_mesh((2,), ("kv",))
    split = NamedSharding(mesh, PartitionSpec("kv"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=split)
    compiled = jax.jit(lambda x: x.sum(0), out_shardings=whole).lower(x).compile()
    assert find_collectives(compiled.as_text()) == (Collective("all-reduce", "f32", 24, True),)
    apart = jax.jit(partial(jnp.multiply, 2)).lower(x).compile()
    assert find_collectives(apart.as_text()) == ()
