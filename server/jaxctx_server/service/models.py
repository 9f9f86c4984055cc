"""ModelService on the model of this process."""

from jaxctx import convert
from jaxctx.engine.interface import Caller
from jaxctx.v1 import model_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.paging import entries_to_find, page_by_id


class LocalModelService:
    """Implements `jaxctx_server.service.interface.ModelService`."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    async def list_models(self, caller: Caller, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        engine = self._lifecycle.model().engine
        page = page_by_id(
            [engine.info.model_id, *engine.adapter_revisions],
            str,
            page_token=request.page_token,
            found=entries_to_find(request.limit),
        )
        return pb.ListModelsResponse(
            models=[self._describe(name) for name in page.entries], next_page_token=page.next_page_token
        )

    async def get_model(self, caller: Caller, request: pb.GetModelRequest) -> pb.GetModelResponse:
        response = pb.GetModelResponse(model=self._describe(request.model_id))
        if request.with_tokenizer:
            response.tokenizer_config = self._lifecycle.model(request.model_id).texts.config_json()
        return response

    def _describe(self, model_id: str) -> pb.Model:
        """A model, or an adapter, as its engine and its tokenizer describe it."""
        model = self._lifecycle.model(model_id)
        described = convert.engine_model_to_proto(model.engine.info)
        if model_id not in ("", described.model_id):
            described.parent_model_id = described.model_id
            described.model_id = model_id
            described.adapter_revision = model.engine.adapter_revisions[model_id]
        formats = model.texts.formats
        described.tool_call_format = formats.tool_calls
        described.reasoning_format = formats.reasoning
        described.special_markers.update(formats.special_markers)
        return described

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        model = self._lifecycle.model(request.model_id)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        tokens = await model.texts.encode(request.text, add_special_tokens=add_special_tokens)
        entries = await model.texts.entries(tokens) if request.with_entries else ()
        return pb.TokenizeResponse(tokens=tokens, entries=entries)

    async def detokenize(self, caller: Caller, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        model = self._lifecycle.model(request.model_id)
        text = await model.texts.decode(request.tokens[:], skip_special_tokens=request.skip_special_tokens)
        pieces = await model.texts.pieces(request.tokens[:]) if request.with_pieces else ()
        return pb.DetokenizeResponse(text=text, pieces=pieces)

    async def apply_chat_template(
        self, caller: Caller, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse:
        model = self._lifecycle.model(request.model_id)
        rendered = await model.texts.render(request.messages)
        response = convert.rendered_chat_to_proto(rendered)
        if request.with_entries:
            response.entries.extend(await model.texts.entries(rendered.tokens))
        return response
