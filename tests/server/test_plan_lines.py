from dataclasses import replace

from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.plan.memory_planner import MemoryPlan
from jaxctx.engine.plan.mesh_plan import CollectiveSum, MeshPlan
from jaxctx_server.engine_plan import EnginePlan
from jaxctx_server.plan_lines import plan_fields, plan_lines

MEMORY = MemoryPlan(1 << 34, 3 << 29, 1 << 20, 5 << 20, 0, -12345 << 10, 123456, 512, 8192, 2)


def test_of_several_chips_the_memory_of_each_and_what_they_send() -> None:
    layer, step = CollectiveSum("all-reduce", "bf16", 2, 16 << 20), CollectiveSum("all-reduce", "bf16", 161, 1288 << 20)
    branch = CollectiveSum("all-gather", "s32", 5, 1 << 17)
    plan = MeshPlan(16, {"kv": 8, "group": 2}, MEMORY, 512, (layer,), (step,), (branch,))
    first, *lines = plan_lines(plan)
    assert first == "  chips                        16 (kv 8 × group 2), each with"
    assert lines[:10] == list(plan_lines(MEMORY))
    assert lines[10:] == [
        "  sent by a layer in a step of 512 rows",
        "        2 all-reduce of bf16        16.00 MiB",
        "  sent by all of the step",
        "      161 all-reduce of bf16     1,288.00 MiB",
        "  in branches of sampling, of which a step takes some",
        "        5 all-gather of s32          0.12 MiB",
    ]


def test_a_draft_model_is_shown_where_there_is_one() -> None:
    assert not any("draft" in line for line in plan_lines(MEMORY))
    beside = MEMORY.beside(3 << 20)
    assert beside.memory_bytes == MEMORY.memory_bytes + (3 << 20)
    assert "  draft                       3.0 MiB" in plan_lines(beside)


def test_what_rows_of_lanes_have_to_spare_is_shown_where_there_is_some() -> None:
    assert not any("spare" in line for line in plan_lines(MEMORY))
    assert "  spare                       2.5 MiB" in plan_lines(replace(MEMORY, spare_bytes=5 << 19))


def test_the_fields_of_several_chips() -> None:
    layer = CollectiveSum("all-reduce", "bf16", 2, 16 << 20)
    mesh = MeshPlan(16, {"kv": 8, "group": 2}, MEMORY, 512, (layer,), (), ())
    sizes = Sizes(128, 256, 2048, moving_pages=4, reason="defaults of this TPU")
    one, several = plan_fields(EnginePlan(sizes, MEMORY)), plan_fields(EnginePlan(sizes, MEMORY, mesh))
    assert (one["page_size"], one["max_batch"], one["max_batch_tokens"], one["tokens"]) == (128, 256, 2048, 8192)
    assert several == one | {
        "chips": 16,
        "mesh": {"kv": 8, "group": 2},
        "rows": 512,
        "every_layer": ({"kind": "all-reduce", "dtype": "bf16", "count": 2, "size_bytes": 16 << 20},),
        "every_step": (),
        "sampling": (),
    }
