"""What a server takes on a chip, or on each of several, which need not be there: `jaxctx-serve plan`."""

from dataclasses import replace

from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.plan.memory_planner import TARGETS, compiling_for, compiling_for_target
from jaxctx.engine.plan.mesh_plan import plan_mesh
from jaxctx.engine.plan.mesh_targets import mesh_target
from jaxctx.engine.runner.attention_choice import wanted_kernel
from jaxctx.engine.runner.matmul_choice import check_matmul_dtype
from jaxctx.errors import InvalidArgument
from jaxctx.model.sharding import GROUP, KV, make_mesh
from jaxctx_server.config import PlanConfig
from jaxctx_server.engine_builder.draft_model import draft_errors, draft_settings, memory_beside_draft
from jaxctx_server.engine_builder.fitting_sizes import first_with_enough_kv, measured_plan
from jaxctx_server.engine_builder.larger_machines import larger_machine, refusing_what_does_not_fit
from jaxctx_server.engine_builder.served_model import describe_model, int4_device, model_shape
from jaxctx_server.engine_builder.user_errors import user_errors
from jaxctx_server.engine_plan import EnginePlan
from jaxctx_server.engine_settings import choices_of_sizes, config_to_measure, model_memory
from jaxctx_server.progress import Progress


def plan(config: PlanConfig, progress: Progress) -> EnginePlan:
    """The sizes and memory of a server with these settings on the target. Raises as `build_engine`."""
    with user_errors(config.model):
        return _plan_one_chip(config, progress) if config.target in ("here", *TARGETS) else _plan_mesh(config, progress)


def _plan_one_chip(config: PlanConfig, progress: Progress) -> EnginePlan:
    with compiling_for(config.target) as (devices, memory):
        if config.tensor > 1:
            raise InvalidArgument.field(
                "tensor", "a plan is for one chip, unless --target names several, as 8xh100 does"
            )
        place, platform = devices[0], devices[0].platform
        model, params = describe_model(config, model_shape(config), int4_device(config, place))
        check_matmul_dtype(model, config.matmul_dtype, platform)
        known = model_memory(config, model, params, place, platform, memory)
        kernel = wanted_kernel(config.attention)
        with refusing_what_does_not_fit(config, model, params, memory, (1, 1)):
            if config.draft_model is not None:
                drafting = draft_settings(config, config.draft_model)
                with draft_errors(config.draft_model):
                    draft, draft_params = describe_model(drafting, model_shape(drafting), int4_device(drafting, place))
                known = memory_beside_draft(
                    config, model, draft, draft_params, known, place, platform, kernel, progress
                )
            found = measured_plan(config, model, params, place, platform, known, kernel, progress)
        return found if found.memory.tokens else replace(found, larger=larger_machine(config, model, params, (1, 1)))


def _plan_mesh(config: PlanConfig, progress: Progress) -> EnginePlan:
    """The plan for all chips of the target."""
    if config.draft_model is not None:
        raise InvalidArgument.field("draft_model", "runs on one device: not with a --target of several")
    machine = mesh_target(config.target)
    with compiling_for_target(machine.name, machine.target) as devices:
        if config.tensor not in (1, len(devices)):
            raise InvalidArgument.field("tensor", f"{machine.name} has {len(devices)} devices: leave it out")
        shape, platform = model_shape(config), devices[0].platform
        mesh = make_mesh(shape, tensor=len(devices), devices=devices)
        int4 = int4_device(config, mesh)
        model, params = describe_model(config, shape, int4)
        check_matmul_dtype(model, config.matmul_dtype, platform)
        known = model_memory(config, model, params, mesh, platform, machine.target.memory)

        def measure(sizes: Sizes) -> EnginePlan:
            measured = plan_mesh(
                lambda layers: describe_model(config, replace(shape, layers=layers), int4),
                shape.layers,
                config_to_measure(config, model, sizes, known, platform),
                mesh,
                machine.target.memory,
                known.share,
                progress.compiled,
            )
            return EnginePlan(sizes, measured.memory, measured)

        axes = (mesh.shape[KV], mesh.shape[GROUP])
        with refusing_what_does_not_fit(config, model, params, machine.target.memory, axes):
            found = first_with_enough_kv(choices_of_sizes(config, platform, known), known, measure)
        return found if found.memory.tokens else replace(found, larger=larger_machine(config, model, params, axes))
