"""What the routes answer, for the OpenAPI description. The bodies themselves are written in replies.py, dashboard.py
and http.py; tests/server/test_openapi.py holds them to this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """All fields that there are; those without a default are always there."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class OpenShape(BaseModel):
    """Fields that can be relied on; there may be more."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


# ---- errors
class ErrorDetail(Shape):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
        "server_error",
    ]  # fmt: skip
    param: str | None
    code: str


class ErrorReply(Shape):
    """OpenAI's error body, of every status from 400 on."""

    error: ErrorDetail


# ---- answers
class CachedTokens(Shape):
    cached_tokens: Count


class Usage(Shape):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class TokenLogprobReply(Shape):
    token: str
    logprob: Annotated[float, Field(le=0)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(TokenLogprobReply):
    top_logprobs: list[TokenLogprobReply]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Shape):
    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(Shape):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[Annotated[float, Field(le=0)]]
    top_logprobs: list[dict[str, Annotated[float, Field(le=0)]]]
    text_offset: list[Count]


class CompletionChoice(Shape):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionReply(Shape):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage


# ---- the model and its tokens
class ModelMeta(Shape):
    architecture: str
    n_vocab: Count
    context_length: Count


class ModelReply(Shape):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: Literal["rimuru"]
    max_model_len: Count
    meta: ModelMeta


class ModelsReply(Shape):
    object: Literal["list"]
    data: Annotated[list[ModelReply], Field(min_length=1, max_length=1)]


class TokenizeReply(Shape):
    tokens: list[Count]
    pieces: list[str] = []
    count: Count
    max_model_len: Count


class DetokenizeReply(Shape):
    """One text under the names that different clients look for."""

    content: str
    text: str
    prompt: str


class TemplateReply(Shape):
    prompt: str


# ---- the server and its memory
class HealthReply(Shape):
    status: Literal["ok"]


class NotReadyReply(Shape):
    status: Literal["draining", "dead"]


class View(Shape):
    pages: Count
    bytes: Count


class MemoryReply(OpenShape):
    """The pool in bytes and pages; what there is beside depends on the model and the device."""

    total_bytes: Count
    pool_bytes: Count
    free_bytes: Count
    dense_bytes: Count
    scratch_bytes: Count
    cached_pages: Count
    views: dict[Literal["expert", "kv", "ssm", "conv", "buffer"], View]
    resident_experts: list[Count]
    requests: list[dict[str, Any]]
    swap: dict[str, Count]


class PoolPicture(Shape):
    huge_bytes: Count
    n_huge: Count
    huge_per_cell: Annotated[int, Field(ge=1)]
    cells: list[list[tuple[str, Annotated[float, Field(ge=0, le=1.001)]]]]


class DashboardReply(OpenShape):
    """What the page at / shows."""

    model: str
    architecture: str
    device: str
    context: Count
    draining: bool
    running: Count
    waiting: Count
    tokens_per_second: Annotated[float, Field(ge=0)]
    output_tokens: Count
    prompt_tokens: Count
    cached_tokens: Count
    requests: dict[Literal["done", "failed", "cancelled", "refused"], Count]
    memory: MemoryReply
    pool: PoolPicture
    changes: list[dict[str, Any]]


REPLIES: tuple[type[BaseModel], ...] = (
    ErrorReply, ChatReply, CompletionReply, ModelReply, ModelsReply, TokenizeReply, DetokenizeReply, TemplateReply,
    HealthReply, NotReadyReply, MemoryReply, DashboardReply,
)  # fmt: skip
