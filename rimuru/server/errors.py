"""Errors of serving, and the body in which a client gets any error."""

from __future__ import annotations

import json
from typing import Any

from rimuru.base.errors import BadInputError, RimuruError


class RequestTimeoutError(RimuruError):
    """A request took longer than the server allows."""

    http_status = 504
    code = "request_timeout"


class QueueTimeoutError(RimuruError):
    """A request waited longer for its turn than the server allows."""

    http_status = 503
    code = "queue_timeout"


class ServerBusyError(RimuruError):
    """More is coming in at once than the server can hold."""

    http_status = 503
    code = "server_busy"


class ShuttingDownError(RimuruError):
    """The server is ending and takes no new requests."""

    http_status = 503
    code = "shutting_down"


class StepFailedError(RimuruError):
    """A step of the engine failed. Only the requests of that step end with this."""

    code = "engine_step_failed"


class UnauthorizedError(BadInputError):
    """No API key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class ForbiddenError(BadInputError):
    """A web page of another origin tried to use the server."""

    http_status = 403
    code = "origin_not_allowed"


class HostError(BadInputError):
    """A server of this machine was called by a name that is not its own."""

    http_status = 403
    code = "host_not_allowed"


class AdminOnlyError(BadInputError):
    """What was asked for concerns all clients, and this one has no admin key."""

    http_status = 403
    code = "admin_key_needed"


class NotFoundError(BadInputError):
    """There is nothing at this address."""

    http_status = 404
    code = "not_found"


class BodyTooLargeError(BadInputError):
    """The request's body exceeds the limit."""

    http_status = 413
    code = "request_too_large"


class BodyTimeoutError(BadInputError):
    """The request's body came too slowly."""

    http_status = 408
    code = "request_timeout"


class NotSupportedError(BadInputError):
    """A part of the API that this server does not offer."""

    code = "not_supported"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class FieldError(BadInputError):
    """A field of a request's body has a wrong type or value."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """OpenAI's name for the kind of error that an HTTP status tells."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(error: Exception) -> dict[str, Any]:
    """The OpenAI error object of any exception; of an unexpected one only the kind is told."""
    if isinstance(error, RimuruError):
        message, status, code = " ".join(str(error).split()), error.http_status, error.code
    else:
        message, status, code = f"internal error: {type(error).__name__}", 500, "internal_error"
    param = getattr(error, "param", None)
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def status_of(error: Exception) -> int:
    """The HTTP status that answers an exception."""
    return error.http_status if isinstance(error, RimuruError) else 500


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. Lone surrogates (JSON input may hold them) become `?`; NaN and infinity are refused."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
