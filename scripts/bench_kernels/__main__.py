"""`python -m bench_kernels`."""

import sys

from bench_kernels.command import main

sys.exit(main())
