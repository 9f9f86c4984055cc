"""Requests and results of the API: one frozen dataclass or enum for each message of protos/jaxctx/v1.

An engine takes the requests and returns the results, which reach the client unchanged. Field names, units and defaults
are those of the messages: `jaxctx.convert` converts between the two, and tests/jaxctx/test_types.py compares them.

Times are UTC datetimes and durations are in seconds. Log probabilities are natural logarithms, of the model's own
distribution. Ids, ranges and sizes are checked by the server; the classes take any value of the right type.

    lifetime     how long objects exist, and times
    contexts     contexts: what they are and what is in them, their pages and changes; fill, plan, compare
    generation   outputs: how their tokens are sampled, what they may look like, and their pieces
    forward      passes over explicit tokens, positions and attention masks
    snapshots    snapshots and publications
    sessions     sessions of programs: variables, calls and the tasks that make one from the other
    models       models and their chat templates
    engines      engines: their properties and their load
"""

from jaxctx.types.contexts import (
    AdapterSpan,
    Comparison,
    ContextChange,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    CreateContextRequest,
    FillResult,
    GetContextResult,
    PlanResult,
    Tier,
    TokenIds,
    UpdateContextRequest,
)
from jaxctx.types.engines import AdapterInfo, Attention, EngineInfo, EngineStats, EngineStatus
from jaxctx.types.forward import ForwardOutputParams, ForwardOutputResult, ForwardRequest, ForwardResult
from jaxctx.types.generation import (
    FinishReason,
    GeneratePiece,
    GenerateRequest,
    OutputFormat,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from jaxctx.types.lifetime import Expiry, Ttl, utc_datetime
from jaxctx.types.models import Model, RenderedChat
from jaxctx.types.sessions import (
    CallOutput,
    Criterion,
    GraphTask,
    Parameter,
    SessionInfo,
    SubmitCallRequest,
    SubmitCallResult,
    TaskPhase,
    VariableInfo,
    VariableState,
)
from jaxctx.types.snapshots import GetSnapshotResult, OpenRequest, Publication, RetentionUpdate, SaveRequest, Snapshot

__all__ = [
    "AdapterInfo",
    "AdapterSpan",
    "Attention",
    "CallOutput",
    "Comparison",
    "ContextChange",
    "ContextEvent",
    "ContextInfo",
    "ContextPages",
    "ContextState",
    "CreateContextRequest",
    "Criterion",
    "EngineInfo",
    "EngineStats",
    "EngineStatus",
    "Expiry",
    "FillResult",
    "FinishReason",
    "ForwardOutputParams",
    "ForwardOutputResult",
    "ForwardRequest",
    "ForwardResult",
    "GeneratePiece",
    "GenerateRequest",
    "GetContextResult",
    "GetSnapshotResult",
    "GraphTask",
    "Model",
    "OpenRequest",
    "OutputFormat",
    "Parameter",
    "PlanResult",
    "Publication",
    "RenderedChat",
    "RetentionUpdate",
    "SamplingParams",
    "SaveRequest",
    "SessionInfo",
    "Snapshot",
    "SubmitCallRequest",
    "SubmitCallResult",
    "TaskPhase",
    "Tier",
    "TokenIds",
    "TokenLogprob",
    "Ttl",
    "UpdateContextRequest",
    "Usage",
    "VariableInfo",
    "VariableState",
    "utc_datetime",
]
