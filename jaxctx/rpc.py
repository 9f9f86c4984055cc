"""The wire: methods of the contract through a channel, and errors, `jaxctx.errors` to the trailers of a call and back.

The server calls `to_status`, the client `from_rpc_error`; the pair is here so that what one writes the other reads. The
form is `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo (google/rpc/error_details.proto), as
protos/jaxctx/v1/error_reason.proto promises. Nothing here decides what is an error.
"""

from datetime import timedelta
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from jaxctx.errors import BY_CODE, FieldViolation, JaxctxError
from jaxctx.services import METHODS

DOMAIN = "jaxctx"
UNSPECIFIED = "UNSPECIFIED"  # the reason of an error that names none

# Trailers travel in HTTP/2 headers, which peers bound to 8 KiB together. These keep the longest status below that.
MAX_MESSAGE_BYTES = 512
MAX_VIOLATIONS = 16
MAX_FIELD_BYTES = 96  # `labels[KEY]` with the longest key, and room
MAX_DESCRIPTION_BYTES = 128


CHANNEL_OPTIONS = [
    # A prefill may be silent for long; a server that is gone must show all the same.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # all tokens of a long context, or the logits of a pass
    ("grpc.max_send_message_length", 64 << 20),
]


def method_of(channel: Any, rpc: str) -> Any:
    """What calls a method of the contract, by its name, through a channel of `grpc` or `grpc.aio`."""
    method = METHODS[rpc]
    write, read = GetMessageClass(method.input_type).SerializeToString, GetMessageClass(method.output_type).FromString
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary  # the contract has no others
    return kind(f"/{method.containing_service.full_name}/{rpc}", write, read)


def to_status(error: JaxctxError) -> grpc.Status:
    """`code`, `details` and `trailing_metadata` with which to end a call: `abort_with_status(s)`, or on asyncio
    `abort(s.code, s.details, s.trailing_metadata)`. Overlong texts are cut and violations past the 16th left out.
    """
    code, message = grpc.StatusCode[error.code].value[0], _cut(error.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(ErrorInfo(domain=DOMAIN, reason=error.reason))
    if error.violations:
        told = [
            {"field": _cut(each.field, MAX_FIELD_BYTES), "description": _cut(each.description, MAX_DESCRIPTION_BYTES)}
            for each in error.violations[:MAX_VIOLATIONS]
        ]
        status.details.add().Pack(BadRequest(field_violations=told))
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
    says_no_more = error_class.default_reason in (error_class.code, "NOT_SERVING")  # than the code does
    plain_reason = error_class.default_reason if says_no_more else UNSPECIFIED
    found = info, bad_request, retry = ErrorInfo(), BadRequest(), RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status else ():
            for message in found:
                detail.Unpack(message)  # does nothing to a message of another type
    except (ValueError, DecodeError):
        pass  # something between us and the server rewrote the status: its code and message still stand
    error = error_class(
        call.details() or code,
        reason=info.reason or plain_reason,
        violations=[FieldViolation(each.field, each.description) for each in bad_request.field_violations],
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
    )
    error.code = code
    return error


def _cut(text: str, limit_bytes: int) -> str:
    """The longest beginning of `text` within the limit, in whole characters; what cannot be UTF-8 becomes "?"."""
    return text.encode(errors="replace")[:limit_bytes].decode(errors="ignore")
