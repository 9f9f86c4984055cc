"""The doors of jaxctx, and the command that opens them.

    grpc/           the gRPC services: decode, validate, hand to the engine, encode
    validate/       the one validator behind every door: requests in, requests of the Engine interface out
    content.py      text and messages to tokens, long ones off the event loop
    access.py       who may call what, and the keys file; keys.py reads that again while the server runs
    serving.py      loading, ready, draining: what doors ask before they take work
    config.py       everything that can be set, once, by flags, environment and file
    command.py      `jaxctx-serve`         serve.py its life from start to drain
    assemble.py     a model directory to a running engine
    addresses.py    what may be listened on
    start.py, progress.py, logs.py   what it prints: banner, mistakes and exit status; progress; logs

The doors translate and decide nothing about a request that is valid. They see an engine only through
`jaxctx.engine.interface`.
"""
