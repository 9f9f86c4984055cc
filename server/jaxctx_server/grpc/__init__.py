"""The gRPC door: a thin translation between the contract's messages and what stands behind every door.

server.py     the server: services, addresses, options of the transport
pipeline.py   every call's way in and out: keys, request ids, limits, errors as statuses
reading.py    requests from bytes to what a method may see: counted, parsed, validated, within their caller's budget
service.py    what every service does with a request: decode, and encode what comes of it
router.py     what a router does with calls that are no program's, and with engines: which one answers
model_services.py, session_service.py, admin_service.py

[authorise ─▶ request id ─▶ limit] ─▶ bytes ─▶ scan ─▶ parse ─▶ validate ─▶ decode ─▶ engine ─▶ encode ─▶ bytes
"""
