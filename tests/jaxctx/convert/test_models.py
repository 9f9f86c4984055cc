"""Models: as they are served, and of which engine."""

from __future__ import annotations

from jaxctx import types
from jaxctx.convert import models
from jaxctx.v1 import model_service_pb2
from tests.jaxctx.convert.examples import example_of


def test_fields_of_a_model_do_not_get_mixed_up() -> None:
    fields = [field for field in model_service_pb2.Model.DESCRIPTOR.fields if field.name != "special_markers"]
    values = {
        field.name: field.name if field.type == field.TYPE_STRING else number for number, field in enumerate(fields, 1)
    }
    message = model_service_pb2.Model(**values)
    model = models.model_from_proto(message)
    assert {name: getattr(model, name) for name in values} == values
    assert models.model_to_proto(model) == message


def test_the_marks_of_a_model_are_a_copy_of_the_message() -> None:
    message = model_service_pb2.Model(special_markers={"[TOOL_CALLS]": 5})
    model = models.model_from_proto(message)
    message.special_markers["[ARGS]"] = 6
    assert model.special_markers == {"[TOOL_CALLS]": 5}


# What an engine's information has not: what its tokenizer knows, and what adapters have.
OF_OTHERS = {"tool_call_format", "reasoning_format", "special_markers", "parent_model_id", "adapter_revision"}


def test_the_model_of_an_engine_has_every_field_that_the_engine_knows() -> None:
    info = example_of(types.EngineInfo)
    message = models.engine_model_to_proto(info)
    for field in model_service_pb2.Model.DESCRIPTOR.fields:
        if field.name not in OF_OTHERS:
            assert getattr(message, field.name) == getattr(info, field.name), field.name


def test_a_rendered_chat_has_its_text_and_its_tokens() -> None:
    chat = types.RenderedChat(text="<user>hi", tokens=(1, 2))
    sent = models.rendered_chat_to_proto(chat)
    assert (sent.text, list(sent.tokens)) == ("<user>hi", [1, 2])
    assert models.rendered_chat_from_proto(sent) == chat
