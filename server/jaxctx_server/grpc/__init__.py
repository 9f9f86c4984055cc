"""The gRPC door: a thin translation between the contract's messages and what stands behind every door.

server.py     the server: services, addresses, options of the transport
pipeline.py   every call's way in and out: stages in one order, errors as statuses
stages.py     the stages: authorisation, request id, limits
context_service.py, snapshot_service.py, model_service.py, admin_service.py, health.py
decode.py, encode.py   messages to plain requests; answers to messages
merge.py      several tokens in one message when the reader is slower than the engine

bytes ─▶ [authorise ─▶ request id ─▶ limits] ─▶ parse ─▶ decode ─▶ validate ─▶ engine ─▶ encode ─▶ bytes
"""
