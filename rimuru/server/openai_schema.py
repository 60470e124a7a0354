"""The bodies of requests: OpenAI's fields and the few of our own, validated; what they say as SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rimuru.request import MAX_ANSWERS, SamplingParams
from rimuru.server.errors import FieldError
from rimuru.server.openai_fields import Biases, Documents, Messages, Prompt, ResponseFormat, Stops, TokenIds, Tools
from rimuru.server.unsupported import refuse_unsupported

MAX_TOP_LOGPROBS = 20

Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    """Unknown fields are tolerated, because clients of other servers send theirs (but for those of unsupported.py);
    wrong types are not."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingFields(Body):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: Stops | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    response_format: ResponseFormat | None = None
    user: Any = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def token_limit(self, context_length: int) -> int:
        """Most tokens of an answer. Unset means up to the end of the context."""
        limit = context_length if self.max_tokens is None else self.max_tokens
        return min(limit, context_length)

    def sampling_params(self, context_length: int, want_logprobs: bool, n_top: int) -> SamplingParams:
        """OpenAI's defaults (temperature 1, no truncation) where a field is absent or null."""
        stop = self.stop if self.stop is not None else ()
        return SamplingParams(
            max_tokens=self.token_limit(context_length),
            temperature=_or(self.temperature, 1.0),
            top_k=max(_or(self.top_k, 0), 0),  # -1 is another server's way of saying off
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias or {},
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            logprobs=n_top,
            n=self.n or 1,
            want_logprobs=want_logprobs,
        )


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    documents: Documents | None = None

    def token_limit(self, context_length: int) -> int:
        """Both names of the limit count; given both, the smaller one."""
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min([context_length, *given])


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def token_limit(self, context_length: int) -> int:
        """OpenAI's default for completions is 16 tokens."""
        return min(_or(self.max_tokens, 16), context_length)

    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt or many, as a list of prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        if not self.prompt:
            raise FieldError("prompt is empty", "prompt")
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(Body):
    """`content`, `text`, `prompt` and `input` are names of one field in different servers."""

    content: str | None = None
    text: str | None = None
    prompt: str | None = None
    input: str | None = None
    add_special: bool = True
    parse_special: bool = True
    with_pieces: bool = False

    def the_text(self) -> str:
        for value in (self.content, self.text, self.prompt, self.input):
            if value is not None:
                return value
        raise FieldError("content is missing: the text to tokenize", "content")


class DetokenizeRequest(Body):
    tokens: TokenIds


class TemplateRequest(Body):
    messages: Messages
    tools: Tools | None = None
    documents: Documents | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ResizeRequest(Body):
    memory: str | int


BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, TemplateRequest, ResizeRequest,
)  # fmt: skip


def parse_body(model: type[Model], value: Any) -> Model:
    """A JSON value as a request. Raises FieldError that names the first wrong field."""
    if not isinstance(value, dict):
        raise FieldError("the body must be a JSON object", None)
    if issubclass(model, SamplingFields):
        refuse_unsupported(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        told = first["msg"].removeprefix("Value error, ")
        same = [other["msg"] for other in others if other["loc"][:-1] == first["loc"][:-1] != ()]
        where = ".".join(str(part) for part in (first["loc"][:-1] if same else first["loc"])) or "body"
        told = ", or: ".join([told, *same[:3]])  # each way to be right tells what it misses
        raise FieldError(f"{where}: {told}", str(first["loc"][0]) if first["loc"] else None) from None


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
