"""The OpenAPI description of bodies that are read and checked by hand (limits first, then JSON, then fields), and of
all that the routes answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from rimuru.server import openapi_replies as replies
from rimuru.server.openai_schema import BODIES
from rimuru.server.settings import ADMIN_PATHS, ServerSettings

_REF = "#/components/schemas/{model}"
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_WHAT = {
    400: "The request is wrong; the message says where",
    401: "No API key, or a wrong one",
    403: "The server is not called so (Host), or pages of this origin or clients with this key may not do this",
    404: "There is nothing of this name",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many answers are waiting",
    500: "A fault of the server",
    503: "Too little memory, too much coming in, no turn in time, or the server is ending",
    504: "The request took longer than it, or the server, allows",
}
_HEADERS = {401: ("WWW-Authenticate", "string"), 429: ("Retry-After", "integer"), 503: ("Retry-After", "integer")}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "One of OpenAI's chunks as JSON; the last is [DONE]"}},
    "required": ["data"],
}
_ALWAYS, _BODY, _ANSWER = (401, 403, 500), (400, 408, 413, 503), (429, 504)


@dataclass(frozen=True)
class Told:
    """What a route answers: its body with 200, and the statuses of errors besides those of all routes."""

    reply: type[BaseModel] | None
    errors: tuple[int, ...] = ()
    streams: bool = False


ROUTES = {
    "/v1/chat/completions": Told(replies.ChatReply, (*_BODY, *_ANSWER), streams=True),
    "/v1/completions": Told(replies.CompletionReply, (*_BODY, *_ANSWER), streams=True),
    "/v1/embeddings": Told(None, (400,)),
    "/v1/models": Told(replies.ModelsReply),
    "/v1/models/{name}": Told(replies.ModelReply, (404,)),
    "/tokenize": Told(replies.TokenizeReply, _BODY),
    "/detokenize": Told(replies.DetokenizeReply, _BODY),
    "/apply-template": Told(replies.TemplateReply, _BODY),
    "/health": Told(replies.HealthReply),
    "/metrics": Told(None, (503,)),
    "/v1/memory": Told(replies.MemoryReply, (503,)),
    "/v1/memory/resize": Told(replies.MemoryReply, _BODY),
    "/v1/dashboard": Told(replies.DashboardReply, (503,)),
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route whose body is this model."""
    return {"requestBody": {"required": True, "content": _content(_JSON, model)}}


def _content(media_type: str, model: type[BaseModel]) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def install(app: FastAPI, settings: ServerSettings) -> None:
    """Complete the application's description: schemas of bodies, every status with its body, the API key."""
    describe, has_keys = app.openapi, bool(settings.api_keys)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for models, mode in ((BODIES, "validation"), (replies.REPLIES, "serialization")):
                for model in models:
                    described = model.model_json_schema(ref_template=_REF, mode=mode)  # type: ignore[arg-type]
                    schemas.update(described.pop("$defs", {}))
                    schemas[model.__name__] = described
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["responses"] = _responses(path)
                    if (has_keys and path != "/health") or (path in ADMIN_PATHS and not settings.is_everybody_admin):
                        operation["security"] = [{"key": []}]
            if not settings.is_everybody_admin:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    told = ROUTES[path]
    responses: dict[str, Any] = {}
    if path == "/metrics":
        text = {"schema": {"type": "string"}}
        responses["200"] = {"description": "Prometheus' text format", "content": {_TEXT: text}}
    elif told.reply is not None:
        responses["200"] = {"description": "Done", "content": _content(_JSON, told.reply)}
    if told.streams:
        responses["200"]["content"][_EVENTS] = {"schema": _EVENT}
    for status in sorted((*_ALWAYS, *told.errors)):
        responses[str(status)] = {"description": _WHAT[status], "content": _content(_JSON, replies.ErrorReply)}
        if status in _HEADERS:
            name, kind = _HEADERS[status]
            responses[str(status)]["headers"] = {name: {"required": True, "schema": {"type": kind}}}
    if path == "/health":
        responses["503"] = {"description": "No requests are taken", "content": _content(_JSON, replies.NotReadyReply)}
    return responses
