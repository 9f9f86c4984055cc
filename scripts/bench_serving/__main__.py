"""`python -m bench_serving`."""

import sys

from bench_serving.command import main

sys.exit(main())
