"""As `serve_echo`, with a model that does what it is asked.

python -m tests.serve_obedient [arguments of jaxctx-serve]
"""

import sys

from jaxctx_server.cli import main
from jaxctx_server.engine_builder import build
from tests.obedient import obedient_model

if __name__ == "__main__":
    build.load_served_model = lambda config, mesh, progress: obedient_model()
    sys.exit(main())
