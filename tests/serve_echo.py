"""`jaxctx-serve` as a process that serves the echo model: the command itself, which only finds another model to load.

python -m tests.serve_echo [arguments of jaxctx-serve]
"""

import sys

from jaxctx_server.cli import main
from jaxctx_server.engine_builder import build
from tests.echo import echo_model

MAX_POSITIONS = 8192


def put_echo_in_place() -> None:
    """From now on `build_engine` finds the echo model, whatever directory it is given."""
    build.load_served_model = lambda config, mesh, progress: echo_model(max_positions=MAX_POSITIONS)


if __name__ == "__main__":
    put_echo_in_place()
    sys.exit(main())
