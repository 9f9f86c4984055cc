"""The Python client: contexts and programs on a jaxctx server as objects.

`blocking` and `asynchronous` hold the two clients, alike but for `await`. What they do is written once, as coroutines:
`clients`, `contexts` and `sessions` are the operations (those that only call are generated), `streams` the outputs of a
context, and `drive` runs them without an event loop too. `link` says how calls travel, `options` what a caller may
choose, `requests` makes messages of it; `jaxctx.answers` is what a client is told. `loops` are programs over contexts,
`templates` what programs of sessions are written with. It is the server that checks and decides.
"""
