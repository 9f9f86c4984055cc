"""Models: what is served, and messages as a model reads them."""

from jaxctx.types import EngineInfo, Model, RenderedChat
from jaxctx.v1 import model_service_pb2


def model_from_proto(message: model_service_pb2.Model) -> Model:
    """A model as it is served."""
    return Model(
        model_id=message.model_id,
        model_revision=message.model_revision,
        architecture=message.architecture,
        parameters=message.parameters,
        vocab_size=message.vocab_size,
        max_context_tokens=message.max_context_tokens,
        page_size=message.page_size,
        dtype=message.dtype,
        weights_dtype=message.weights_dtype,
        kv_dtype=message.kv_dtype,
        default_max_tokens=message.default_max_tokens,
        tool_call_format=message.tool_call_format,
        reasoning_format=message.reasoning_format,
        special_markers=dict(message.special_markers),
        parent_model_id=message.parent_model_id,
        adapter_revision=message.adapter_revision,
    )


def model_to_proto(value: Model) -> model_service_pb2.Model:
    """A model as it is served."""
    return model_service_pb2.Model(
        model_id=value.model_id,
        model_revision=value.model_revision,
        architecture=value.architecture,
        parameters=value.parameters,
        vocab_size=value.vocab_size,
        max_context_tokens=value.max_context_tokens,
        page_size=value.page_size,
        dtype=value.dtype,
        weights_dtype=value.weights_dtype,
        kv_dtype=value.kv_dtype,
        default_max_tokens=value.default_max_tokens,
        tool_call_format=value.tool_call_format,
        reasoning_format=value.reasoning_format,
        special_markers=value.special_markers,
        parent_model_id=value.parent_model_id,
        adapter_revision=value.adapter_revision,
    )


def engine_model_to_proto(value: EngineInfo) -> model_service_pb2.Model:
    """The model of an engine, without what only its tokenizer knows."""
    return model_service_pb2.Model(
        model_id=value.model_id,
        model_revision=value.model_revision,
        architecture=value.architecture,
        parameters=value.parameters,
        vocab_size=value.vocab_size,
        max_context_tokens=value.max_context_tokens,
        page_size=value.page_size,
        dtype=value.dtype,
        weights_dtype=value.weights_dtype,
        kv_dtype=value.kv_dtype,
        default_max_tokens=value.default_max_tokens,
    )


def rendered_chat_from_proto(message: model_service_pb2.ApplyChatTemplateResponse) -> RenderedChat:
    """Messages as a model reads them."""
    return RenderedChat(text=message.text, tokens=tuple(message.tokens))


def rendered_chat_to_proto(value: RenderedChat) -> model_service_pb2.ApplyChatTemplateResponse:
    """Messages as a model reads them."""
    return model_service_pb2.ApplyChatTemplateResponse(text=value.text, tokens=value.tokens)
