"""The Python client: contexts and programs on a jaxctx server as objects.

`clients`, `contexts` and `sessions` are the asyncio client; `link` says how its calls travel and what its `async with`
blocks do, and `loops` are programs over contexts. Operations that are one call each are generated from the contract
(jaxctx/v1/operations.py). The blocking client is generated from all of these: the same words without `await`
(jaxctx/v1/blocking, by scripts/stubs).

The same for both are `requests`, which makes messages of what a caller chooses (jaxctx/v1/options.py), `streams`, what
comes of a context, and `templates`, what programs of sessions are written with; `jaxctx.types` is what a client is
told. `gathering` is where the two differ. It is the server that checks and decides.
"""
