"""The Python client: contexts on a jaxctx server as objects.

`blocking` and `aio` hold the two clients, alike but for `await`. What they share does no I/O: `types` is what a client
is told, `requests` and `answers` translate to and from messages, `outputs` joins a stream's pieces, `view` is what a
context knows without asking, `link` says how calls travel. Nothing here checks ranges or decides: the server does.
Imports the stubs, gRPC and `jaxctx.errors`; never JAX or numpy.
"""
