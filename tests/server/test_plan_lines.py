from jaxctx.engine.runner.memory_planner import MemoryPlan
from jaxctx.engine.runner.mesh_plan import CollectiveSum, MeshPlan
from jaxctx_server.plan_lines import plan_lines

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
