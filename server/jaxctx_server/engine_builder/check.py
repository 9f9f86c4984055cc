"""The kernels and whole steps of this machine's device against the reference: `jaxctx-serve check`."""

from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxctx.engine.factory import use_compilation_cache
from jaxctx.engine.runner.attention_choice import require_kernel, wanted_kernel
from jaxctx.engine.runner.check.comparison import OnCase, check_kernels
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.check.timing import time_kernels
from jaxctx.engine.runner.check.whole_step import check_whole_steps, step_tolerance
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.matmul_choice import check_matmul_dtype
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.sharding import make_mesh, parameter_sharding
from jaxctx.model.weights import load_model
from jaxctx.model.weights.formats import open_source
from jaxctx_server.config import CheckConfig, ServeConfig
from jaxctx_server.engine_builder.fitting_sizes import largest_program
from jaxctx_server.engine_builder.served_model import describe_model, int4_device, model_shape, types_of
from jaxctx_server.engine_builder.user_errors import user_errors

WEIGHTS = "weights"
"""What a check says while they are loaded."""


def check(config: CheckConfig, on_case: OnCase) -> KernelReport:
    """What the check of the kernels finds on this machine's device; with timings where the kernel works.

    `on_case` is called before each case. Raises as `build_engine`.
    """
    with user_errors(config.model):
        if config.compile_cache is not None:
            use_compilation_cache(config.compile_cache)
        shape = model_shape(config)
        mesh = make_mesh(shape, tensor=config.tensor) if config.tensor > 1 else None
        int4 = int4_device(config, mesh or jax.devices()[0], is_there=True)
        model, params = describe_model(config, shape, int4)
        check_matmul_dtype(model, config.matmul_dtype, jax.default_backend())
        if mesh is not None:
            places = [parameter_sharding(mesh, spec.axes, spec.shape) for spec in model.specs]
            params = tuple(param.update(sharding=place) for param, place in zip(params, places, strict=True))
        program = largest_program(config, model, params, mesh, wanted_kernel(config.attention))
        require_kernel(program, config.attention)
        name = "bundled" if config.model is None else Path(config.model).name
        report = check_kernels(program, name, on_case)
        if report.kernel_verdict is not Verdict.EQUAL:
            return report
        if program.kernel.name != "reference":
            report = _with_whole_steps(config, mesh, program, report, on_case)
        if report.kernel_verdict is not Verdict.EQUAL:
            return report
        on_case(report, "timings")
        return replace(report, timings=time_kernels(program))


def _with_whole_steps(
    config: ServeConfig, mesh: Mesh | None, program: CompiledModel, report: KernelReport, on_case: OnCase
) -> KernelReport:
    """The report with whole steps, or with the reason why there are none."""
    path = Path(config.model or BUNDLED)
    if not path.is_dir():
        return replace(report, why_no_steps="a built-in shape has no weights")
    types = types_of(config)._asdict()
    try:
        open_source(path)
        int4 = int4_device(config, mesh or jax.devices()[0], is_there=True)
        loaded = load_model(path, **types, int4=int4, mesh=mesh, progress=lambda done, total: on_case(report, WEIGHTS))
        tolerance = step_tolerance(loaded.model.kv)
        cases = check_whole_steps(loaded.model, loaded.params, program, lambda case: on_case(report, case))
    except CheckpointError as error:
        return replace(report, why_no_steps=error.message)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return replace(report, why_no_steps="the device's memory is too small for the weights and a step")
    return replace(report, cases=(*report.cases, *cases), step_tolerance=tolerance)
