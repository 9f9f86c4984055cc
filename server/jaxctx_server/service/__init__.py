"""The service layer: what each call of the contract does, whatever the transport it came by.

A transport (gRPC; HTTP) takes a call through the pipeline, which says who calls and whether the call may be made, reads
and validates its request, and turns errors into the typed ones of `jaxctx.errors`. Then it calls one method here, named
as the RPC in snake_case, with the caller and the contract's request message, and gets the contract's response message.
Nothing here knows a transport; nothing here decides anything about a request that is valid.

    interface.py       the services as Protocols: one method for each RPC
    contexts.py, snapshots.py, models.py
                       those that need a model, on the engine of this process (on a router: `jaxctx_server.router`)
    sessions.py        sessions and programs
    admin.py           load, drain, cache
    paging.py          pages of lists and their tokens
    pipeline.py        every call's way in and out
    request_reader.py  requests from bytes to valid messages, within their caller's budget
"""
