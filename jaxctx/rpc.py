"""gRPC for both ends: services and methods of the contract, channel options, and errors as statuses and back.

The server calls `to_status`, the client `from_rpc_error`; both are here so that one reads what the other writes. The
form is `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo (google/rpc/error_details.proto), as
protos/jaxctx/v1/error_reason.proto promises. Nothing here decides what is an error.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from jaxctx.errors import BY_CODE, FieldViolation, JaxctxError
from jaxctx.v1 import (
    admin_service_pb2,
    context_service_pb2,
    engine_service_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)

DOMAIN = "jaxctx"
UNSPECIFIED = "UNSPECIFIED"  # the reason of an error that names none

# Trailers travel in HTTP/2 headers, which peers bound to 8 KiB together. These keep the longest status below that.
MAX_MESSAGE_BYTES = 512
MAX_VIOLATIONS = 16
MAX_FIELD_BYTES = 96  # more than `labels[KEY]` with the longest key takes
MAX_DESCRIPTION_BYTES = 128

# The services of protos/jaxctx/v1 by their names.
SERVICES: Mapping[str, ServiceDescriptor] = {
    "AdminService": admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
    "ContextService": context_service_pb2.DESCRIPTOR.services_by_name["ContextService"],
    "EngineService": engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"],
    "ModelService": model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    "SessionService": session_service_pb2.DESCRIPTOR.services_by_name["SessionService"],
    "SnapshotService": snapshot_service_pb2.DESCRIPTOR.services_by_name["SnapshotService"],
}
# All methods of all services by their names, which are unique.
METHODS: Mapping[str, MethodDescriptor] = {
    method.name: method for service in SERVICES.values() for method in service.methods
}

CHANNEL_OPTIONS = [
    # A prefill may be silent for long; a server that is gone must show all the same.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # all tokens of a long context, or the logits of a pass
    ("grpc.max_send_message_length", 64 << 20),
]


def to_status(error: JaxctxError) -> grpc.Status:
    """The status with which a server ends a call: its `code`, `details` and `trailing_metadata`.

    A blocking servicer calls `abort_with_status(status)`, one on asyncio `abort(status.code, status.details,
    status.trailing_metadata)`. Overlong texts are cut and violations after the 16th left out.
    """
    code = grpc.StatusCode[error.code].value[0]
    status = status_pb2.Status(code=code, message=_cut(error.message, MAX_MESSAGE_BYTES))
    status.details.add().Pack(ErrorInfo(domain=DOMAIN, reason=error.reason))
    if error.violations:
        bad_request = BadRequest()
        for violation in error.violations[:MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=_cut(violation.field, MAX_FIELD_BYTES),
                description=_cut(violation.description, MAX_DESCRIPTION_BYTES),
            )
        status.details.add().Pack(bad_request)
    if error.retry_after_s is not None:
        status.details.add().Pack(RetryInfo(retry_delay=timedelta(seconds=error.retry_after_s)))
    return cast(grpc.Status, rpc_status.to_status(status))


def from_rpc_error(rpc_error: grpc.RpcError) -> JaxctxError:
    """The error that ended a call, of the class of its status code.

    A status without our details (gRPC's own, a proxy's) keeps its code and message; its reason is the class's own where
    the code says as much, and else UNSPECIFIED. A code without a class gives a plain JaxctxError that has this `code`.
    """
    call = cast(grpc.Call, rpc_error)  # every RpcError that ends a call also is one, or answers like one
    code = call.code().name
    error_class = BY_CODE.get(code, JaxctxError)
    # The class's own reason follows from the code alone only where it says no more than the code does.
    code_implies_reason = error_class.default_reason in (error_class.code, "NOT_SERVING")
    reason_without_details = error_class.default_reason if code_implies_reason else UNSPECIFIED
    info, bad_request, retry = ErrorInfo(), BadRequest(), RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status else ():
            detail.Unpack(info)  # Unpack does nothing to a message of another type
            detail.Unpack(bad_request)
            detail.Unpack(retry)
    except (ValueError, DecodeError):
        pass  # something between us and the server rewrote the status: its code and message still stand
    error = error_class(
        call.details() or code,
        reason=info.reason or reason_without_details,
        violations=[FieldViolation(each.field, each.description) for each in bad_request.field_violations],
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
    )
    error.code = code
    return error


def _cut(text: str, limit_bytes: int) -> str:
    """The longest beginning of `text` within the limit, in whole characters; what cannot be UTF-8 becomes "?"."""
    return text.encode(errors="replace")[:limit_bytes].decode(errors="ignore")
