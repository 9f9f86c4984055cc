"""The server of jaxctx, and the command that starts it.

    grpc/            the gRPC transport: one method an RPC
    http/            HTTP: the APIs of OpenAI and Anthropic, programs, operations, the page
    service/         what each call does, whatever its transport; the call pipeline: keys, limits, validation, errors
    validate/        the one validator of requests
    router/          the same services on a router, by the engines of other processes
    services.py      the services of one server, by its role
    lifecycle.py     loading, ready, draining; what is served
    tokenizer_pool.py  text and messages to tokens, long ones off the event loop
    auth.py          who may call what, and the keys file; key_store.py reads it again while the server runs
    tls.py           certificates, read again while the server runs; file_stamps.py says whether a file has changed
    config.py        everything that can be set, once, by flags, environment and file
    cli.py           `jaxctx-serve`; server.py one run of a server, from start to drain
    engine_builder/  a model directory to a running engine, or to a plan; engine_settings.py the engine's configuration
    cluster.py       what the servers of one cluster know each other by; an engine's registration with its router
    deploy/          engines on a Ray cluster (`jaxctx-serve ray`), a manifest for Kubernetes
    engine_bounds.py   how many engines `jaxctx-serve ray` may start
    kernel_check.py  the check of kernels in a process of its own (`jaxctx-serve check`)
    graph_svg.py     the graph of a session as a picture (`jaxctx-serve draw`)
    addresses.py     which addresses may be listened on
    errors.py, banner.py, progress.py, logs.py
                     exit statuses, and what the process prints

The server decodes, authorises, validates and translates, and decides nothing about a request that is valid. It sees an
engine only through `jaxctx.engine.interface`.
"""
