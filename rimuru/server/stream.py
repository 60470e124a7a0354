"""A job's events to its client: as server-sent events, or as one body. A client that leaves ends its job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rimuru.server.errors import error_body, to_json
from rimuru.server.jobs import Job, JobFailed
from rimuru.server.loop import EngineLoop
from rimuru.server.replies import AnswerState, ReplyHead, Writer, usage_body

Result = TypeVar("Result")

LOGPROBS_AT_ONCE = 1000
"""Tokens with log-probabilities; bodies with more of them are made in a worker thread."""
QUIET_S = 10.0
"""After this long without news the headers are sent, and then a comment, so that no proxy or client gives up."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientLeftError, with the work cancelled, as soon as the client leaves."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        await _end(task, watcher)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class Reply:
    """Follows one job to its end and writes what it says."""

    def __init__(
        self,
        loop: EngineLoop,
        job: Job,
        states: list[AnswerState],
        writer: Writer,
        head: ReplyHead,
        wants_usage: bool,
        measure: Callable[[float | None, float], None],
    ) -> None:
        """measure(seconds to the first token, seconds in all) is called when the answer is complete."""
        self.loop, self.job, self.states, self.writer, self.head = loop, job, states, writer, head
        self.wants_usage, self.measure = wants_usage, measure
        self.first_token_s: float | None = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return all(state.finish_reason is not None for state in self.states)

    def note(self) -> str:
        """The request's line in the log: numbers, no text."""
        usage = usage_body(self.states, self.job.params.n)
        first = "-" if self.first_token_s is None else f"{self.first_token_s:.3f}"
        reasons = ",".join(sorted({state.finish_reason or "none" for state in self.states}))
        return (
            f"id={self.head.request_id} prompt={usage['prompt_tokens']} "
            f"cached={usage['prompt_tokens_details']['cached_tokens']} output={usage['completion_tokens']} "
            f"first_s={first} finish={reasons}"
        )

    def _note_first(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.job.started

    def _note_end(self) -> None:
        self.measure(self.first_token_s, time.monotonic() - self.job.started)

    # ---- whole
    async def whole(self) -> bytes:
        """The body of a request that does not stream, as JSON. Raises what the job failed with."""
        parts: list[list[Any]] = [[] for _ in self.states]
        try:
            while not self.is_done:
                for event in await self.job.mailbox.take():
                    if isinstance(event, JobFailed):
                        raise event.error
                    self._note_first()
                    parts[event.index] += self.states[event.index].take(event)
        finally:
            self.loop.cancel(self.job)
        self._note_end()
        n_entries = sum(len(state.logprobs) for state in self.states)
        if n_entries <= LOGPROBS_AT_ONCE:
            return self._whole_json(parts)
        return await to_thread.run_sync(self._whole_json, parts)  # others are answered meanwhile

    def _whole_json(self, parts: list[list[Any]]) -> bytes:
        """Choice by choice: the encoder lets no other thread run before it is done."""
        head = self.head.body(self.writer.body_kind, [])
        del head["choices"]
        choices = b",".join(to_json(self.writer.whole(state, parts[state.index])) for state in self.states)
        usage = to_json(usage_body(self.states, self.job.params.n))
        return to_json(head)[:-1] + b',"choices":[' + choices + b'],"usage":' + usage + b"}"

    # ---- streamed
    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events up to `[DONE]`; an empty one where there has been nothing to say for a while.

        Raises what the job failed with if that is its first event, so that it can be told by the HTTP status.
        """
        opened: set[int] = set()
        n_events = 0
        while not self.is_done:
            events = await self.job.mailbox.take(QUIET_S)
            if not events:
                n_events += 1  # the headers go out with this
                yield b": waiting\n\n"
            for event in events:
                n_events += 1
                if isinstance(event, JobFailed):
                    self.error = event.error
                    if n_events == 1:
                        raise event.error
                    yield b"data: " + to_json(error_body(event.error)) + b"\n\n"
                    return
                self._note_first()
                state = self.states[event.index]
                choices = self.writer.pieces(state, state.take(event))
                if event.index not in opened:
                    opened.add(event.index)
                    first = self.writer.first(state)
                    choices = choices if first is None else [first, *choices]
                data = b"".join(self._chunk([choice], None) for choice in choices)
                if data or n_events == 1:
                    yield data
        self._note_end()
        if self.wants_usage:
            yield self._chunk([], usage_body(self.states, self.job.params.n))
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        body = self.head.body(self.writer.chunk_kind, choices)
        if self.wants_usage:
            body["usage"] = usage
        return b"data: " + to_json(body) + b"\n\n"


class EventStreamResponse(Response):
    """Sends chunks while the client is there; the job ends with the response, however that ends."""

    def __init__(self, reply: Reply, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__()
        self.reply, self._first, self._rest = reply, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self.reply.loop.cancel(self.reply.job)
            scope.setdefault("state", {})["note"] = self.reply.note()
            await _end(pump, watcher)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._rest:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def event_stream(request: Request, reply: Reply) -> EventStreamResponse:
    """The streaming response, once the job's first event has come. Raises its error, or ClientLeftError."""
    chunks = reply.chunks()
    try:
        first = await while_connected(request, _next(chunks))
    except BaseException:
        reply.loop.cancel(reply.job)
        raise
    return EventStreamResponse(reply, first, chunks)


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await chunks.__anext__()
