"""The gRPC door: a thin translation between the contract's messages and what stands behind every door.

server.py     the server: services, addresses, options of the transport
pipeline.py   every call's way in and out: keys, request ids, limits, errors as statuses
service.py    what every service does with a request: decode and validate
router.py     what a core does with calls that are no program's, and with engines: which one answers
model_services.py, session_service.py, admin_service.py

bytes ─▶ [authorise ─▶ request id ─▶ limit] ─▶ parse ─▶ decode ─▶ validate ─▶ engine ─▶ encode ─▶ bytes
"""
