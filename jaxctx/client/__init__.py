"""The Python client: contexts on a jaxctx server as objects.

`blocking` and `aio` hold the two clients, alike but for `await`. What they share does no I/O: `types` is what a client
is told and `options` what it may choose; `requests` and `answers` translate to and from messages, and `passes` and
`kept` do both, for forward passes and for snapshots; `outputs` joins a stream's pieces, `view` is what a context knows
without asking, `link` says how calls travel. `loops` are programs over contexts, written once for both clients. Nothing
here checks ranges or decides: the server does. Imports the stubs, gRPC and `jaxctx.errors`; never JAX or numpy.
"""
