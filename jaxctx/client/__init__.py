"""The Python client: contexts and programs on a jaxctx server as objects.

    client.py      Client: a connection, and every call that is not of one context or session
    context.py     Context and Stream: operations on a context, and its outputs as they come
    session.py     Session and Variable: programs of many calls
    channel.py     the gRPC channel with its stubs: retries, deadlines, the caller's key
    calls.py       how a cancelled call is told, and the time that is left of an operation of several calls
    decoding/      beam search, best of n, speculative and windowed decoding, as programs over contexts

These are the asyncio client. The blocking client in `_sync/` is the same code without `await`, written from it by
scripts/sync_client.py; neither is a wrapper of the other. Shared by both, as they make no calls:

    requests.py    arguments as request messages
    options.py     options of outputs, for type checkers
    streams.py     pieces of an output, and whole outputs
    templates.py   prompt templates of semantic calls
    tls.py         the files of TLS
    gathering.py   several calls at once: the one place where the two clients differ by more than words

Results are the dataclasses of `jaxctx.types`. Values are checked by the server alone.
"""
