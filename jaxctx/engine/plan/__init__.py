"""Plans: what an engine takes on chips that need not be there, as their compilers say.

    memory_planner.py  the chips that are known (h200.txtpb describes a GPU to XLA), and where a chip's memory goes
    mesh_targets.py    names of machines of several chips
    mesh_plan.py       where the memory of each of several chips goes, and what they send each other
    collectives.py     what devices send each other, read from the text of a compiled function

Used by `jaxctx-serve plan`, by a start for the number of pages that fit, and by the compile checks. Never by an engine.
"""
