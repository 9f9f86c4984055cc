"""One attention, three implementations: the one that a plan's shape names is traced.

Kernels know nothing of masks, which only passes have: under a mask the reference serves every platform.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Float32

from jaxctx_kernels import reference
from jaxctx_kernels.plan import AttentionPlan, PlanShape
from jaxctx_kernels.pool import Pool
from jaxctx_kernels.reference import Mask


@partial(jax.jit, static_argnames="shape")  # layers of a step, and programs of one shape, share a trace; XLA inlines it
def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pool: Pool,
    v_pool: Pool,
    plan: AttentionPlan,
    mask: Mask | None = None,
    *,
    shape: PlanShape,
) -> Float32[Array, "rows heads head_dim"]:
    """Softmax attention, scale head_dim**-0.5, of every row over the tokens that its plan and `mask` let it see.

    Query heads `h * group .. h * group + group - 1` read KV head h. Rows that see no token return zeros. No value of a
    slot that no row sees reaches the result, not even NaN, and no row's NaN reaches a row of another sequence. Under a
    mask a value that is not finite reaches only the rows that see it, as NaN. `mask` covers every index of the plan.
    """
    if shape.kernel == "gpu" and mask is None:
        from jaxctx_kernels.gpu import attend as on_gpu  # needs JAX 0.11

        return on_gpu(q, k_pool, v_pool, plan, shape=shape)
    if shape.kernel == "tpu" and mask is None:
        from jaxctx_kernels.tpu import attend as on_tpu

        return on_tpu(q, k_pool, v_pool, plan, shape=shape)
    return reference.attend(q, k_pool, v_pool, plan, shape=shape, mask=mask)
