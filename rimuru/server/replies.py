"""Bodies of answers, whole and in chunks, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rimuru.request import Piece, TokenLogprob
from rimuru.server.answer_parser import AnswerReader
from rimuru.server.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from rimuru.server.jobs import AnswerPiece
from rimuru.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""What OpenAI reports for a token that cannot come; JSON has no minus infinity."""


class LogprobGate:
    """Lets a token's log-probability through only with the token's text, so that nothing of a stop string shows."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], eog_ids: frozenset[int]) -> None:
        """eog_ids: tokens that end an answer; they have no text and are not shown."""
        self._tokenizer, self._stops, self._eog_ids = tokenizer, stops, eog_ids
        self._held: list[TokenLogprob] = []
        self._n_shown_bytes = 0
        self._n_passed_bytes = 0

    def push(self, piece: Piece) -> list[TokenLogprob]:
        """The entries that may be shown now."""
        self._held += piece.logprobs or []
        self._n_shown_bytes += len(piece.text.encode("utf-8", "replace"))
        ended_by_text = piece.finish_reason == "stop" and bool(self._held) and not self._is_end(self._held[-1])
        if not self._stops or (piece.finish_reason is not None and not ended_by_text):
            passed, self._held = self._held, []
        else:
            passed = self._covered()
        return [entry for entry in passed if not self._is_end(entry)]

    def _is_end(self, entry: TokenLogprob) -> bool:
        return entry.token_id in self._eog_ids

    def _covered(self) -> list[TokenLogprob]:
        """Entries of tokens whose bytes lie within what has been shown."""
        n = 0
        for entry in self._held:
            n_bytes = 0 if self._tokenizer is None else len(self._tokenizer.piece_bytes(entry.token_id))
            if self._n_passed_bytes + n_bytes > self._n_shown_bytes:
                break
            self._n_passed_bytes += n_bytes
            n += 1
        passed, self._held = self._held[:n], self._held[n:]
        return passed


@dataclass(slots=True)
class AnswerState:
    """One answer as far as it has come."""

    index: int
    parser: AnswerReader
    finish_reason: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of tokens whose text has been given; `new_logprobs` are the last piece's."""
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprob_gate: LogprobGate | None = None

    def take(self, event: AnswerPiece) -> list[AnswerPart]:
        """What a piece adds; sets finish_reason with the last."""
        self.n_prompt, self.n_cached = event.n_prompt_tokens, event.n_cached_tokens
        self.n_output += len(event.piece.token_ids)
        if self.logprob_gate is not None:
            self.new_logprobs = self.logprob_gate.push(event.piece)
            self.logprobs += self.new_logprobs
        parts = self.parser.push(event.piece.text) if event.piece.text else []
        if event.piece.finish_reason is not None:
            parts += self.parser.finish()
            called = event.piece.finish_reason == "stop" and self.parser.n_calls > 0
            self.finish_reason = "tool_calls" if called else event.piece.finish_reason
        return parts


def usage_body(answers: Sequence[AnswerState], n_per_prompt: int) -> dict[str, Any]:
    """Tokens of a request; a prompt that n answers share counts once."""
    firsts = [answer for answer in answers if answer.index % n_per_prompt == 0]
    n_prompt, n_output = sum(a.n_prompt for a in firsts), sum(a.n_output for a in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": sum(a.n_cached for a in firsts)},
    }


class LogprobWriter:
    """Log-probabilities as the two APIs show them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def _text(self, token_id: int) -> str:
        return str(token_id) if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._entry(e.token_id, e.logprob), "top_logprobs": [self._entry(i, value) for i, value in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """`offset`: characters of the answer before the first of these tokens."""
        texts, offsets = [self._text(e.token_id) for e in entries], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(e.logprob, LOWEST_LOGPROB) for e in entries],
            "top_logprobs": [{self._text(i): max(v, LOWEST_LOGPROB) for i, v in e.top} for e in entries],
            "text_offset": offsets,
        }


@dataclass(slots=True)
class ReplyHead:
    """What every body of one request repeats."""

    request_id: str
    created: int
    model: str

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class ChatWriter:
    """Chunks and bodies of /v1/chat/completions."""

    chunk_kind, body_kind = "chat.completion.chunk", "chat.completion"

    def __init__(self, logprobs: LogprobWriter | None) -> None:
        self._logprobs = logprobs

    def first(self, state: AnswerState) -> dict[str, Any] | None:
        """The chunk that opens an answer."""
        return self._choice(state, {"role": "assistant", "content": ""}, ())

    def pieces(self, state: AnswerState, parts: list[AnswerPart]) -> list[dict[str, Any]]:
        """The chunks of a piece; log-probabilities go with the first of them."""
        entries = state.new_logprobs
        deltas = [_delta(part) for part in parts]
        if entries and not deltas:
            deltas = [{"content": ""}]
        choices = [self._choice(state, delta, entries if i == 0 else ()) for i, delta in enumerate(deltas)]
        if state.finish_reason is not None:
            choices.append({**self._choice(state, {}, ()), "finish_reason": state.finish_reason})
        return choices

    def _choice(self, state: AnswerState, delta: dict[str, Any], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        logprobs = self._logprobs.chat(entries) if self._logprobs is not None and entries else None
        return {"index": state.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def whole(self, state: AnswerState, parts: list[AnswerPart]) -> dict[str, Any]:
        """The choice of a whole answer."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = whole_calls(parts)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None if self._logprobs is None else self._logprobs.chat(state.logprobs)
        return {"index": state.index, "message": message, "logprobs": logprobs, "finish_reason": state.finish_reason}


def _delta(part: AnswerPart) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def whole_calls(parts: list[AnswerPart]) -> list[dict[str, Any]]:
    """The tool calls of an answer with all their arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return list(calls.values())


class CompletionWriter:
    """Chunks and bodies of /v1/completions."""

    chunk_kind = body_kind = "text_completion"

    def __init__(self, logprobs: LogprobWriter | None) -> None:
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def first(self, state: AnswerState) -> dict[str, Any] | None:
        return None

    def pieces(self, state: AnswerState, parts: list[AnswerPart]) -> list[dict[str, Any]]:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        offset = self._offsets.get(state.index, 0)
        self._offsets[state.index] = offset + len(text)
        logprobs = None
        if self._logprobs is not None and state.new_logprobs:
            logprobs = self._logprobs.completion(state.new_logprobs, offset)
        if not text and logprobs is None and state.finish_reason is None:
            return []
        return [{"index": state.index, "text": text, "logprobs": logprobs, "finish_reason": state.finish_reason}]

    def whole(self, state: AnswerState, parts: list[AnswerPart]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        logprobs = None if self._logprobs is None else self._logprobs.completion(state.logprobs, 0)
        return {"index": state.index, "text": text, "logprobs": logprobs, "finish_reason": state.finish_reason}


Writer = ChatWriter | CompletionWriter
