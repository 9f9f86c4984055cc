"""As `serve_echo`, with tokens of one or two printable characters.

python -m tests.serve_pairs [arguments of jaxctx-serve]
"""

import sys

from jaxctx_server.cli import main
from jaxctx_server.engine_builder import build
from tests.echo import echo_model, pairs_text

if __name__ == "__main__":
    build.load_served_model = lambda config, mesh, progress: echo_model(pairs_text(), max_positions=8192)
    sys.exit(main())
