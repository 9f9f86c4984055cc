"""Sphinx configuration: MyST pages, and reference pages that are generated from the source when the site is built.

`scripts/docs` builds the site. Warnings are errors there, so that a dead link or an unknown name fails.
"""

import importlib.metadata
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))
sys.path.insert(0, str(ROOT))

import command_line_reference  # noqa: E402 - found by the path above
import protocol_reference  # noqa: E402

project = "jaxctx"
author = "the jaxctx authors"
try:
    release = importlib.metadata.version("jaxctx")
except importlib.metadata.PackageNotFoundError:  # built from a source tree that was not installed
    release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "field_comments"]
exclude_patterns = ["_ext", "_build"]
html_theme = "furo"
html_title = "jaxctx"
html_static_path = ["_static"]

nitpicky = True  # a reference to an unknown name is a warning, and warnings are errors
myst_heading_anchors = 3
myst_enable_extensions = ["deflist", "colon_fence"]
suppress_warnings: list[str] = []

# Docstrings write names between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "inherited-members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
field_comment_modules = [
    "jaxctx.types.lifetime",
    "jaxctx.types.contexts",
    "jaxctx.types.generation",
    "jaxctx.types.forward",
    "jaxctx.types.snapshots",
    "jaxctx.types.sessions",
    "jaxctx.types.models",
    "jaxctx.types.engines",
    "jaxctx.client.options",
    "jaxctx.client.streams",
    "jaxctx.client.templates",
]
python_use_unqualified_type_names = True
# Names in signatures that have no page here: private ones, type variables, and those of Python and gRPC.
nitpick_ignore_regex = [("py:.*", ".*")]


def generate_reference(app: Sphinx) -> None:
    """Write the pages that come from the protos and from the command's settings."""
    generated = DOCS / "reference" / "generated"
    generated.mkdir(exist_ok=True)
    protocol_reference.write_pages(ROOT, generated / "protocol")
    command_line_reference.write_page(ROOT / "server" / "jaxctx_server" / "config.py", generated / "configuration.md")


def setup(app: Sphinx) -> None:
    """Register the generators with Sphinx."""
    app.connect("builder-inited", generate_reference)
