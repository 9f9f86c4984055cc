"""HTTP beside a server or router: the OpenAI API, programs, and a page that shows programs as they run.

    app.py            all paths in one Starlette application
    serve.py          `jaxctx-serve http`: that application on a port, until a signal
    backend.py        the calls of the gRPC server that requests become
    errors.py         errors as JSON with an HTTP status
    headers.py        headers that are refused
    messages.py       request messages of the contract out of paths, queries and bodies; responses as JSON
    limits.py         limits of a connection: how many there are, how long headers and bodies may take
    request_body.py   limits of a body: its type, its size, how much JSON it holds
    openai/           /v1/completions, /v1/chat/completions, /v1/models
    programs/         sessions, variables, calls and graphs
    page/             /

A request becomes calls of the gRPC server, with the key (`authorization`) that came with it. The server decides who may
do what and what is valid. Nothing is kept here between requests.

Only loopback is served: to be reached from elsewhere a proxy with TLS has to stand in front. Errors are {"error":
{"message", "type", "code", "param"}}. Texts that are read as they come are server-sent events. A call ends when the
client that made the request is gone. Up to 512 connections are served; headers have up to 16 KiB and 10 seconds, a body
8 MiB and 30 seconds.
"""
