"""As `serve_echo`, with a token for each character.

python -m tests.serve_characters [arguments of jaxctx-serve]
"""

import sys

from jaxctx_server import assemble
from jaxctx_server.command import main
from tests.echo import character_text, echo_model

if __name__ == "__main__":
    assemble._model = lambda config, mesh, progress: echo_model(character_text(), max_positions=8192)
    sys.exit(main())
