"""The routes. Each reads its body, hands the work to the engine's thread, and writes the answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rimuru import __version__
from rimuru.base.errors import BadInputError, NotEnoughMemoryError, RimuruError
from rimuru.base.heap import give_back_freed
from rimuru.base.units import parse_bytes
from rimuru.server import openai_schema as schema
from rimuru.server.arrivals import Arrivals
from rimuru.server.bodies import Bodies
from rimuru.server.dashboard import STATIC, ChangeLog, memory_report, snapshot
from rimuru.server.errors import (
    FieldError,
    NotFoundError,
    NotSupportedError,
    error_body,
    status_of,
    to_json,
)
from rimuru.server.jobs import Job, Mailbox
from rimuru.server.loop import EngineLoop, call_engine, call_engine_in_pieces
from rimuru.server.metrics import Metrics
from rimuru.server.openapi import body_of, install
from rimuru.server.prepare import Prepared, Preparer
from rimuru.server.replies import (
    AnswerState,
    ChatWriter,
    CompletionWriter,
    LogprobGate,
    LogprobWriter,
    ReplyHead,
    Writer,
)
from rimuru.server.settings import ServerSettings
from rimuru.server.stream import ClientLeftError, Reply, event_stream, while_connected

Model = TypeVar("Model", bound=BaseModel)
Body = TypeVar("Body", bound=schema.SamplingFields)
Result = TypeVar("Result")
LARGE_BODY_BYTES = 64 << 10
HEAP_BODY_BYTES = 256 << 10
"""Work on a larger body takes fifty megabytes and more, which are given back to the system after it."""
JSON_VALUES = 20_000
_PAGE_TYPES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}


class JsonResponse(Response):
    """JSON as UTF-8; what cannot be encoded (lone surrogates) is replaced."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class Service:
    """What the routes share."""

    def __init__(self, loop: EngineLoop, settings: ServerSettings) -> None:
        self.loop, self.settings = loop, settings
        self.preparer = Preparer(loop.loaded)
        self.metrics = Metrics(loop)
        self.changes = ChangeLog(loop.loaded)
        self.model_name = settings.model_name or loop.loaded.config.name or loop.loaded.gguf.path.stem
        self.created = int(time.time())
        self._large = CapacityLimiter(2)
        self._arrivals = Arrivals()
        self.bodies = Bodies(settings)

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The request's JSON body, checked."""
        async with self.bodies.of(request) as data:
            return await self.work(request, _parse, data, model)

    async def work(self, request: Request, function: Callable[..., Result], *args: Any) -> Result:
        """Run a function in a worker thread. Few large requests are worked on at once: each may take seconds and
        hundreds of megabytes, and small ones must not wait for them."""
        limiter = self._large if _is_large(request) else None
        if request.state.n_body_bytes > HEAP_BODY_BYTES:
            return await to_thread.run_sync(_then_give_back, function, *args, limiter=limiter)
        return await to_thread.run_sync(function, *args, limiter=limiter)

    async def answer(
        self,
        request: Request,
        model: type[Body],
        prepare: Callable[[Body], Prepared],
        prefix: str,
        new_writer: Callable[[Body], Writer],
    ) -> Response:
        """Run a job and reply as the body asks, streamed or whole. A client's jobs go to the engine in the order in
        which their bodies came; only large ones, which take longer to prepare, may be passed by small ones."""
        async with AsyncExitStack() as held:
            data = await held.enter_async_context(self.bodies.of(request))
            place = held.enter_context(self._arrivals.place(request.state.client, _is_large(request)))
            body = await self.work(request, _parse, data, model)
            prepared = await self.work(request, prepare, body)
            reply = self._reply(request, body, prepared, prefix, new_writer(body))
            await place.turn()
            self.loop.submit(reply.job)
        if body.stream:
            return await event_stream(request, reply)
        try:
            return Response(await while_connected(request, reply.whole()), media_type="application/json")
        finally:
            request.state.note = reply.note()

    def _reply(
        self, request: Request, body: schema.SamplingFields, prepared: Prepared, prefix: str, writer: Writer
    ) -> Reply:
        priority = body.priority or 0
        if priority > self.settings.max_priority:
            raise FieldError(f"priority may be at most {self.settings.max_priority} on this server", "priority")
        job = Job(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompts=prepared.prompts,
            params=prepared.params,
            mailbox=Mailbox(),
            priority=priority,
            client=request.state.client,
            timeout_s=_least(body.timeout, self.settings.request_timeout_s),
            make_constraint=prepared.make_constraint,
        )
        states = [
            AnswerState(i, prepared.new_parser(), logprob_gate=self._gate(prepared, bool(body.ignore_eos)))
            for i in range(job.n_answers)
        ]
        head = ReplyHead(job.request_id, int(time.time()), body.model or self.model_name)
        return Reply(self.loop, job, states, writer, head, bool(body.stream) and body.wants_usage, self._measure)

    def _measure(self, first_token_s: float | None, total_s: float) -> None:
        if first_token_s is not None:
            self.metrics.first_token.observe(first_token_s)
            self.metrics.request.observe(total_s)

    def _gate(self, prepared: Prepared, ignore_eos: bool) -> LogprobGate | None:
        if not prepared.params.want_logprobs:
            return None
        eog_ids = frozenset() if ignore_eos else self.loop.engine.eog_ids
        return LogprobGate(self.loop.loaded.tokenizer, tuple(prepared.params.stop), eog_ids)

    def logprobs(self, wanted: bool) -> LogprobWriter | None:
        return LogprobWriter(self.loop.loaded.tokenizer) if wanted else None

    def model_body(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "rimuru",
            "max_model_len": self.preparer.context_length,
            "meta": {
                "architecture": self.loop.loaded.config.architecture,
                "n_vocab": self.loop.engine.n_vocab,
                "context_length": self.preparer.context_length,
            },
        }

    async def engine(self, function: Callable[[], Any]) -> Any:
        return await call_engine(self.loop, function)


def _is_large(request: Request) -> bool:
    return bool(request.state.n_body_bytes > LARGE_BODY_BYTES)


def _then_give_back(function: Callable[..., Result], *args: Any) -> Result:
    try:
        return function(*args)
    finally:
        give_back_freed()


def _parse(data: bytes, model: type[Model]) -> Model:
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise BadInputError("the body is nested too deeply") from None
    except ValueError as error:
        raise BadInputError(f"the body is no JSON: {str(error)[:200]}") from None
    return schema.parse_body(model, value)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def create_app(loop: EngineLoop, settings: ServerSettings) -> FastAPI:
    """The application of a loop that has been started."""
    app = FastAPI(title="Rimuru", version=__version__, docs_url=None, redoc_url=None)
    service = Service(loop, settings)
    app.state.service = service
    loop.after_step = service.changes.observe
    _add_errors(app, loop)
    _add_answers(app, service)
    _add_text(app, service)
    _add_state(app, service)
    _add_dashboard(app, service)
    install(app, settings)
    return app


def _add_errors(app: FastAPI, loop: EngineLoop) -> None:
    async def known(request: Request, error: Exception) -> Response:
        headers = {"Retry-After": "1"} if status_of(error) in (429, 503) else None
        return JsonResponse(error_body(error), status_code=status_of(error), headers=headers)

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told: RimuruError = NotFoundError(f"there is nothing at {request.url.path}")
        if error.status_code != 404:
            told = BadInputError(str(error.detail))
        body = error_body(told)
        return JsonResponse(body, status_code=error.status_code, headers=error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        loop.note_failure()
        return await known(request, error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    app.add_exception_handler(RimuruError, known)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(ClientLeftError, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_of(schema.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        def writer(body: schema.ChatRequest) -> Writer:
            return ChatWriter(service.logprobs(bool(body.logprobs)))

        return await service.answer(request, schema.ChatRequest, service.preparer.chat, "chatcmpl", writer)

    @app.post("/v1/completions", openapi_extra=body_of(schema.CompletionRequest))
    async def completions(request: Request) -> Response:
        def writer(body: schema.CompletionRequest) -> Writer:
            return CompletionWriter(service.logprobs(body.logprobs is not None))

        return await service.answer(request, schema.CompletionRequest, service.preparer.completion, "cmpl", writer)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise NotSupportedError("this server generates text; it makes no embeddings")

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [service.model_body()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model_name:
            raise NotFoundError(f"the model served here is {service.model_name!r}")
        return JsonResponse(service.model_body())


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=body_of(schema.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await service.read(request, schema.TokenizeRequest)
        return Response(await service.work(request, _tokenize, service, body), media_type="application/json")

    @app.post("/detokenize", openapi_extra=body_of(schema.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await service.read(request, schema.DetokenizeRequest)
        service.preparer.check_ids(body.tokens)
        text = await service.work(request, service.preparer.tokenizer.decode, body.tokens, True)
        return JsonResponse({"content": text, "text": text, "prompt": text})

    @app.post("/apply-template", openapi_extra=body_of(schema.TemplateRequest))
    async def apply_template(request: Request) -> Response:
        body = await service.read(request, schema.TemplateRequest)
        rendered = await service.work(request, service.preparer.template, body)
        return JsonResponse({"prompt": rendered.text})


def _tokenize(service: Service, body: schema.TokenizeRequest) -> bytes:
    tokenizer, text = service.preparer.tokenizer, body.the_text()
    service.preparer.check_text(text)
    ids = tokenizer.encode(text, body.parse_special, body.add_special and tokenizer.add_bos)
    parts = [b'{"tokens":', _list_json(ids)]
    if body.with_pieces:
        parts += [b',"pieces":', _list_json([tokenizer.token_text(i) for i in ids])]
    counts = {"count": len(ids), "max_model_len": service.preparer.context_length}
    return b"".join([*parts, b",", to_json(counts)[1:]])


def _list_json(values: list[Any]) -> bytes:
    """A list as JSON, some of it at a time: the encoder lets no other thread run before it is done."""
    parts = (values[i : i + JSON_VALUES] for i in range(0, len(values), JSON_VALUES))
    return b"[" + b",".join(to_json(part)[1:-1] for part in parts) + b"]"


def _add_state(app: FastAPI, service: Service) -> None:
    loop = service.loop

    @app.get("/health")
    async def health() -> Response:
        if not loop.is_alive:
            return JsonResponse({"status": "dead"}, status_code=503)
        if loop.is_draining:
            return JsonResponse({"status": "draining"}, status_code=503)
        return JsonResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        report = await service.engine(lambda: memory_report(loop.loaded))
        return Response(service.metrics.text(report), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/memory")
    async def memory() -> Response:
        return JsonResponse(await service.engine(lambda: memory_report(loop.loaded)))

    @app.post("/v1/memory/resize", openapi_extra=body_of(schema.ResizeRequest))
    async def resize(request: Request) -> Response:
        body = await service.read(request, schema.ResizeRequest)
        n_bytes = parse_bytes(body.memory)

        try:
            await call_engine_in_pieces(loop, loop.loaded.resize_steps(n_bytes))
        except NotEnoughMemoryError as error:  # here the size is the client's wish, not the server's trouble
            raise FieldError(str(error), "memory") from None
        return JsonResponse(await service.engine(lambda: memory_report(loop.loaded)))


def _add_dashboard(app: FastAPI, service: Service) -> None:
    @app.get("/v1/dashboard")
    async def state() -> Response:
        return JsonResponse(await service.engine(lambda: snapshot(service.loop, service.changes, service.model_name)))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "dashboard.html", media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in _PAGE_TYPES:
            raise NotFoundError(f"there is no file {name!r}")
        return FileResponse(STATIC / name, media_type=_PAGE_TYPES[name], headers=_PAGE_HEADERS)


_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
