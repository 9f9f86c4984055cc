"""The description of the paths of models, which OpenAI clients and clients of the contract share."""

from jaxctx.v1.model_service_pb2 import ListModelsRequest, Model
from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    json_response,
    operation,
    path_parameter,
    schema_ref,
)
from jaxctx_server.http.message_schemas import query_parameters, response_schemas

TAG = "models"
DESCRIPTION = "The models that this server serves."
MODEL_FIELDS: Json = {
    "id": {"type": "string"},
    "object": {"const": "model"},
    "created": {"type": "integer"},
    "owned_by": {"type": "string"},
    "max_model_len": {"type": "integer", "description": "The longest sequence, in tokens."},
}
ADAPTER_FIELDS: Json = {
    "parent": {"type": "string", "description": "Of an adapter: the model that it changes."},
    "root": {"type": "string", "description": "Of an adapter: its name."},
}


def models_description() -> ApiDescription:
    """All paths of models."""
    listed = operation(
        operation_id="ListModels",
        tag=TAG,
        summary="The models.",
        parameters=query_parameters(ListModelsRequest.DESCRIPTOR),
        success=json_response("The models, or a page of them.", schema_ref("ModelList")),
        errors=(504,),
    )
    found = operation(
        operation_id="GetModel",
        tag=TAG,
        summary="A model.",
        parameters=[path_parameter("model_id", "Its name.", {"type": "string", "minLength": 1, "maxLength": 256})],
        success=json_response("The model.", schema_ref("OpenAIModelAndModel")),
        errors=(404, 504),
    )
    paths: dict[str, Json] = {
        "/v1/models": {"get": listed},
        "/v1/models/": {"get": {**listed, "operationId": "ListModelsBelow"}},
        "/v1/models/{model_id}": {"get": found},
    }
    return ApiDescription(tag=TAG, description=DESCRIPTION, paths=paths, schemas=model_schemas())


def model_schemas() -> dict[str, Json]:
    """The schemas of the answers."""
    model_list: Json = {
        "type": "object",
        "required": ["object", "data", "models", "next_page_token"],
        "additionalProperties": False,
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": schema_ref("OpenAIModel")},
            "models": {"type": "array", "items": schema_ref("Model")},
            "next_page_token": {"type": "string"},
        },
    }
    both: Json = {
        "type": "object",
        "required": [*MODEL_FIELDS, "model"],
        "additionalProperties": False,
        "properties": {**MODEL_FIELDS, **ADAPTER_FIELDS, "model": schema_ref("Model")},
    }
    openai_model: Json = {
        "type": "object",
        "required": list(MODEL_FIELDS),
        "additionalProperties": False,
        "properties": {**MODEL_FIELDS, **ADAPTER_FIELDS},
    }
    return {
        "ModelList": model_list,
        "OpenAIModelAndModel": both,
        "OpenAIModel": openai_model,
        **response_schemas(Model.DESCRIPTOR),
    }
