"""Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand."""
