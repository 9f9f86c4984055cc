"""Programs over HTTP: sessions, semantic variables, calls and graphs, on the paths that the contract names.

The contract (protos/jaxctx/v1/session_service.proto) says by `google.api.http` which path is which method; `routes.py`
lists them by hand, and a test compares the two. A body is the request message as JSON, by the names of its fields;
without a body the fields are in the query. Responses are JSON too.
"""
