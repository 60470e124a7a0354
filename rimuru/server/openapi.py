"""The OpenAPI description of bodies that are read and checked by hand (limits first, then JSON, then fields)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from rimuru.server.openai_schema import BODIES

_REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route whose body is this model."""
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def install(app: FastAPI) -> None:
    """Add the bodies' schemas, and the one shape of all errors, to the application's description."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for model in BODIES:
                described = model.model_json_schema(ref_template=_REF)
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].setdefault("default", {"description": "An OpenAI error body"})
                    operation["responses"].pop("422", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
