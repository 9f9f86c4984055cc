"""jaxctx."""
