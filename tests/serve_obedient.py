"""As `serve_echo`, with a model that does what it is asked.

python -m tests.serve_obedient [arguments of jaxctx-serve]
"""

import sys

from jaxctx_server import engine_builder
from jaxctx_server.cli import main
from tests.obedient import obedient_model

if __name__ == "__main__":
    engine_builder._model = lambda config, mesh, progress: obedient_model()
    sys.exit(main())
