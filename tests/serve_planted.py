"""`jaxctx-serve` on a CPU that has a kernel: one of `tests.planted_kernels`, named by PLANTED_KERNEL.

PLANTED_KERNEL=page python -m tests.serve_planted [arguments of jaxctx-serve]
"""

import os
import sys

from jaxctx_server.cli import main
from tests.planted_kernels import WRONG, aborts, first_layer_only, never_ends, plant_kernel, right

name = os.environ["PLANTED_KERNEL"]
# Not only in the main process: what checks kernels is a process of its own, which imports this module, too.
others = {"right": right, "aborts": aborts, "never ends": never_ends, "first layer": first_layer_only}
planted = plant_kernel(others.get(name) or WRONG[name][0])
planted.__enter__()

if __name__ == "__main__":
    sys.exit(main())
