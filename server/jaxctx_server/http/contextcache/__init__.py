"""The context cache: contexts that are kept under a session id between requests.

    POST /v1/context             makes one, with the fields of /v1/completions or /v1/chat/completions
    x-session-id                 on /v1/completions, /v1/chat/completions, /v1/responses: continue one
    x-session-ttl                without an id on those paths: make one
    GET, PATCH, DELETE, fork     below /v1/context

    headers.py     the three headers, read and checked
    stored_context.py  a kept context: how it is found, saved, and told of
    registry.py    which are in use now, and which have expired
    report.py      what of a kept context a request could use, and why not all of it
    use.py         one request's use of a kept context
    routes.py      the paths below /v1/context
    app.py         all paths

A kept context is a snapshot (see `jaxctx_server.http.stored`): durable if the server has a store, in its owner's
namespace, with a time to live. Each use saves its end as the next version, and drops the one before. A use that ends
early, by an error or because the client left, leaves it as it was. One request at a time may use it; a second one gets
409 at once. To continue one context in two ways at the same time, fork it.
"""
