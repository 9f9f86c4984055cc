"""The gRPC transport: from the wire to the service layer and back, with one explicit method for each RPC.

server.py       the server: services, and options of the transport
interceptor.py  the call pipeline around every method; errors as statuses
caller.py       the Caller of a call: tenant and deadline
context_service.py, snapshot_service.py, model_service.py, session_service.py, admin_service.py, engine_service.py
                the servicers, which call `jaxctx_server.service`
health_service.py  grpc.health.v1
"""
