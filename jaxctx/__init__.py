"""jaxctx: an inference server whose first-class object is the context; this is its Python client.

    with jaxctx.Client() as client, client.create("def fib(n):") as context:
        for piece in context.generate(max_tokens=64, temperature=0.8):
            print(piece.text, end="")

`import jaxctx` needs neither JAX nor numpy. The server is `jaxctx-serve`; its parts are the packages beside this file.
"""

import importlib.metadata

from jaxctx import aio, decoding, errors
from jaxctx.client._sync.client import Client
from jaxctx.client._sync.context import Context, Stream
from jaxctx.client._sync.session import Session, Variable
from jaxctx.client.options import ChatOptions, ForwardOutputOptions, GenerateOptions, SamplingOptions
from jaxctx.client.streams import Completion, Piece
from jaxctx.client.templates import Call, Input, Output, Template, semantic
from jaxctx.client.tls import Tls
from jaxctx.errors import JaxctxError
from jaxctx.types import (
    AdapterInfo,
    AdapterSpan,
    Attention,
    Comparison,
    ContextChange,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    Criterion,
    EngineInfo,
    EngineStats,
    EngineStatus,
    Expiry,
    FillResult,
    FinishReason,
    ForwardOutputResult,
    ForwardResult,
    GeneratePiece,
    GetContextResult,
    GetSnapshotResult,
    GraphTask,
    Model,
    OutputFormat,
    PlanResult,
    Publication,
    RenderedChat,
    SessionInfo,
    Snapshot,
    SubmitCallResult,
    TaskPhase,
    Tier,
    TokenIds,
    TokenLogprob,
    Usage,
    VariableInfo,
    VariableState,
)

__all__ = [
    "AdapterInfo",
    "AdapterSpan",
    "Attention",
    "Call",
    "ChatOptions",
    "Client",
    "Comparison",
    "Completion",
    "Context",
    "ContextChange",
    "ContextEvent",
    "ContextInfo",
    "ContextPages",
    "ContextState",
    "Criterion",
    "EngineInfo",
    "EngineStats",
    "EngineStatus",
    "Expiry",
    "FillResult",
    "FinishReason",
    "ForwardOutputOptions",
    "ForwardOutputResult",
    "ForwardResult",
    "GenerateOptions",
    "GeneratePiece",
    "GetContextResult",
    "GetSnapshotResult",
    "GraphTask",
    "Input",
    "JaxctxError",
    "Model",
    "Output",
    "OutputFormat",
    "Piece",
    "PlanResult",
    "Publication",
    "RenderedChat",
    "SamplingOptions",
    "Session",
    "SessionInfo",
    "Snapshot",
    "Stream",
    "SubmitCallResult",
    "TaskPhase",
    "Template",
    "Tier",
    "Tls",
    "TokenIds",
    "TokenLogprob",
    "Usage",
    "Variable",
    "VariableInfo",
    "VariableState",
    "aio",
    "decoding",
    "errors",
    "semantic",
]

try:
    __version__ = importlib.metadata.version("jaxctx")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"
