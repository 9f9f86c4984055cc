"""Errors: one small hierarchy, the same on the server, on the wire and in the client.

Each class is one gRPC status, named after it; `reason` is one value of `jaxctx.v1.ErrorReason` (without its prefix) and
is what programs should test; the message is for people. An error means that nothing changed, unless its docstring says
otherwise. The classes are generated from protos/jaxctx/v1/error_reason.proto, which says what goes with each status;
by hand is what all have.
"""

from jaxctx.status import BY_CODE as BY_CODE
from jaxctx.status import FieldViolation as FieldViolation
from jaxctx.status import JaxctxError as JaxctxError
from jaxctx.v1.errors import *  # noqa: F403
