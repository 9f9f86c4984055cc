"""The description of the page's path."""

from jaxctx_server.http.api_description import ApiDescription, Json, operation

TAG = "page"
DESCRIPTION = "The page of this server."


def page_description() -> ApiDescription:
    """The path of the page."""
    page: Json = {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    described = operation(operation_id="GetPage", tag=TAG, summary="The page.", success=page, needs_key=False)
    return ApiDescription(tag=TAG, description=DESCRIPTION, paths={"/": {"get": described}}, schemas={})
