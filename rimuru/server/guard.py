"""Around all routes: who may come in, and one line in the log for each request."""

from __future__ import annotations

import hmac
import logging
import time

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rimuru.base.errors import RimuruError
from rimuru.server.errors import AdminOnlyError, ForbiddenError, HostError, UnauthorizedError, error_body, to_json
from rimuru.server.settings import ADMIN_PATHS, ServerSettings, host_name

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/", "/health", "/static/dashboard.css", "/static/dashboard.js"))
"""Open without an API key: the page holds no data, it asks for them with the key that its user types in."""


class Guard:
    """ASGI middleware. Keys are compared in constant time; a page of a foreign origin is refused unless allowed.

    hosts: the only names by which the server may be called (ServerSettings.hosts_at).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, hosts: frozenset[str] | None) -> None:
        self.app, self.settings, self.hosts = app, settings, hosts
        self._admin_keys = [key.encode() for key in settings.admin_keys]
        # Admin keys alone do not close the API to others.
        self._keys = [key.encode() for key in settings.api_keys] + self._admin_keys if settings.api_keys else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        state = scope.setdefault("state", {})

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            state["client"] = self._client(scope, headers)
            refusal = self._refusal(scope["path"], scope["method"], headers)
            if refusal is not None:
                await self._refuse(refusal, scope, receive, watched_send)
            else:
                # The answer to HEAD is the one to GET; uvicorn leaves its body out.
                inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self.app(inner, receive, watched_send)
        finally:
            self._log(scope, status, time.monotonic() - started)

    def _log(self, scope: Scope, status: int, duration_s: float) -> None:
        path = scope["path"].encode("unicode_escape").decode()[:200]
        level = logging.DEBUG if status == 200 and "note" not in scope["state"] else logging.INFO
        note = scope["state"].get("note", "")
        log.log(level, "%s %s %s %.3f s %s", scope["method"], path, status or "aborted", duration_s, note)

    async def _refuse(self, error: RimuruError, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, UnauthorizedError) else None
        body = to_json(error_body(error))
        response = Response(body, error.http_status, headers=headers, media_type="application/json")
        await response(scope, receive, send)

    def _refusal(self, path: str, method: str, headers: Headers) -> RimuruError | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return HostError("this server answers to local names only; one more is allowed with --allowed-host NAME")
        if origin is not None and not self._may_come_from(origin, host):
            return ForbiddenError("web pages of this origin may not use the server; allow them with --cors-origin")
        if method == "OPTIONS":  # what a browser asks before it sends a key; it does nothing
            return None
        if self._keys and path not in OPEN_PATHS and not _has_key(headers, self._keys):
            return UnauthorizedError("a valid API key is needed: Authorization: Bearer KEY")
        if path in ADMIN_PATHS and not self.settings.is_everybody_admin and not _has_key(headers, self._admin_keys):
            return AdminOnlyError("this needs one of the keys that the server was given with --admin-key-file")
        return None

    def _may_come_from(self, origin: str, host: str) -> bool:
        allowed = self.settings.cors_origins
        is_own = host != "" and origin.partition("://")[2].lower() == host.lower()
        return is_own or "*" in allowed or origin in allowed

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Who shares the engine fairly with others: a key where the server has several, else a network address."""
        if len(self._keys) > 1:
            return f"key {_given_key(headers)}"
        return str((scope.get("client") or ("",))[0])


def _has_key(headers: Headers, keys: list[bytes]) -> bool:
    given, found = _given_key(headers), False
    for key in keys:  # every key is compared, so that the time tells nothing
        found |= hmac.compare_digest(given.encode("utf-8", "replace"), key)
    return found


def _given_key(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
