"""The blocking client.

Generated from jaxctx/client by scripts/stubs. Not edited by hand.
"""
