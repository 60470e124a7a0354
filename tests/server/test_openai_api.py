"""The API through OpenAI's own client: answers, streams, limits, usage, log-probabilities (H01, H03, H07, H09)."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from script_model import ALPHABET, HELLO

SCRIPT_TAIL = "鬱" + ALPHABET.lower()


def chat(server: Any, **options: Any) -> Any:
    return server.client.chat.completions.create(model="any", messages=HELLO, temperature=0, **options)


def streamed(server: Any, **options: Any) -> tuple[str, str | None, Any, list[Any]]:
    """(text, finish reason, usage, chunks) of a streamed chat; checks the order of chunks that H07 asks for."""
    chunks = list(chat(server, stream=True, **options))
    with_choice = [c for c in chunks if c.choices]
    reasons = [c.choices[0].finish_reason for c in with_choice]
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] is not None
    usage = [c.usage for c in chunks if c.usage is not None]
    text = "".join(c.choices[0].delta.content or "" for c in with_choice)
    return text, reasons[-1], usage[0] if usage else None, chunks


def test_chat_whole_and_streamed_are_equal(script: Any) -> None:
    whole = chat(script)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ALPHABET, "stop")
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (27, whole.usage.prompt_tokens + 27)
    text, reason, usage, chunks = streamed(script)
    assert (text, reason, usage) == (ALPHABET, "stop", None)
    assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1


def test_stream_is_server_sent_events_with_one_end(script: Any) -> None:
    with script.http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("usage" not in body for body in bodies)
    assert sum(body["choices"][0]["finish_reason"] is not None for body in bodies) == 1


def test_stream_usage_equals_the_whole_answers(script: Any) -> None:
    for options in ({}, {"stop": ["DEFGHIJ"]}, {"max_tokens": 7}):
        whole = chat(script, **options)
        _, _, usage, chunks = streamed(script, stream_options={"include_usage": True}, **options)
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize(
    ("limits", "n", "reason"),
    [
        ({"max_tokens": 5}, 5, "length"),
        ({"max_completion_tokens": 5}, 5, "length"),
        ({"max_completion_tokens": 26}, 26, "length"),
        ({"max_completion_tokens": 27}, 27, "stop"),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4, "length"),
    ],
)
def test_token_limits(script: Any, limits: dict[str, int], n: int, reason: str) -> None:
    whole = chat(script, **limits)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ALPHABET[:n], reason)
    assert whole.usage.completion_tokens == n
    assert streamed(script, **limits)[:2] == (ALPHABET[:n], reason)


@pytest.mark.parametrize(
    ("stop", "text"), [(["DEFGHIJ"], "ABC"), (["CD", "BCX"], "AB"), ("Z", ALPHABET[:-1]), (["A"], ""), ([], ALPHABET)]
)
def test_stop_strings_never_show(script: Any, stop: Any, text: str) -> None:
    whole = chat(script, stop=stop, logprobs=True)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
    assert [entry.token for entry in whole.choices[0].logprobs.content] == list(text)
    shown, reason, _, chunks = streamed(script, stop=stop, logprobs=True)
    assert (shown, reason) == (text, "stop")
    entries = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert entries == list(text)


def test_a_character_over_two_tokens_comes_whole(script: Any) -> None:
    def complete(**options: Any) -> Any:
        return script.client.completions.create(model="m", prompt="!", temperature=0, **options)

    assert complete(max_tokens=40).choices[0].text == SCRIPT_TAIL
    pieces = [c.choices[0].text for c in complete(max_tokens=40, stream=True)]
    assert "".join(pieces) == SCRIPT_TAIL and not any("\ufffd" in piece for piece in pieces)
    half = complete(max_tokens=1)
    assert half.choices[0].text in ("", "\ufffd")
    assert (half.choices[0].finish_reason, half.usage.completion_tokens) == ("length", 1)
    assert complete(max_tokens=40, stop=["鬱a"]).choices[0].text == ""


def test_logprobs_of_chats(script: Any) -> None:
    whole = chat(script, logprobs=True, top_logprobs=2, max_tokens=3)
    entries = whole.choices[0].logprobs.content
    assert [(e.token, e.bytes) for e in entries] == [("A", [65]), ("B", [66]), ("C", [67])]
    for entry in entries:
        assert entry.logprob == pytest.approx(-1.1e-5, abs=5e-6)
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[1].logprob < -15
    chunks = streamed(script, logprobs=True, top_logprobs=2, max_tokens=3)[3]
    assert [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content] == entries
    assert chat(script, max_tokens=1).choices[0].logprobs is None


def test_logprobs_of_completions(script: Any) -> None:
    def complete(**options: Any) -> Any:
        return script.client.completions.create(
            model="m", prompt="0", temperature=0, max_tokens=3, logprobs=1, **options
        )

    found = complete().choices[0].logprobs
    assert found.tokens == ["1", "2", "3"] and found.text_offset == [0, 1, 2]
    assert [list(top) for top in found.top_logprobs] == [["1"], ["2"], ["3"]]
    parts = [c.choices[0].logprobs for c in complete(stream=True) if c.choices[0].logprobs]
    assert [t for p in parts for t in p.tokens] == found.tokens
    assert [o for p in parts for o in p.text_offset] == found.text_offset


def test_several_answers_and_seeds(script: Any) -> None:
    def texts(seed: int | None, **options: Any) -> list[str]:
        answer = script.client.completions.create(
            model="m", prompt="0", temperature=50, max_tokens=12, n=3, seed=seed, **options
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = texts(11)
    assert first == texts(11) and len(set(first)) == 3
    assert texts(12) != first and texts(None) != texts(None)
    joined = ["", "", ""]
    for chunk in script.client.completions.create(
        model="m", prompt="0", temperature=50, max_tokens=12, n=3, seed=11, stream=True
    ):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == first


def test_many_prompts_in_one_request(script: Any) -> None:
    answer = script.client.completions.create(model="m", prompt=["0", "!", "5"], temperature=0, max_tokens=3, n=2)
    assert [c.text for c in answer.choices] == ["123", "123", "鬱a", "鬱a", "678", "678"]
    assert [c.index for c in answer.choices] == list(range(6))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 18)
    ids = script.post("/tokenize", {"content": "0"}).json()["tokens"]
    for prompt in (ids, [ids]):
        assert (
            script.client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=2).choices[0].text
            == "12"
        )


def test_no_tokens_asked_for(script: Any) -> None:
    answer = script.client.completions.create(model="m", prompt="0", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0


def test_bias_and_penalties_act(script: Any) -> None:
    five = script.post("/tokenize", {"content": "5"}).json()["tokens"][0]
    answer = script.client.completions.create(model="m", prompt="0", temperature=0, max_tokens=3, logit_bias={five: 50})
    assert answer.choices[0].text == "555"
    answer = script.client.completions.create(
        model="m", prompt="0", temperature=0, max_tokens=4, logit_bias={five: 19}, presence_penalty=4
    )
    assert answer.choices[0].text == "5678"


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 1}, {"top_k": 1 << 40}, {"top_p": 0}, {"min_p": 1.0}])
@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-4])
def test_extreme_sampling_is_safe(script: Any, options: dict[str, Any], temperature: float) -> None:
    """S05: greedy whatever the filters, tiny temperatures without overflow."""
    body = {"prompt": "0", "max_tokens": 3, "temperature": temperature, **options}
    assert script.post("/v1/completions", body).json()["choices"][0]["text"] == "123"


def test_prefix_hits_are_reported_and_change_nothing(script: Any) -> None:
    """H09, S03: a warm prompt gives the same tokens, with penalties too, and prompt_tokens stays whole."""
    content = "a long prompt that fills pages " * 4
    options = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "extra_body": {"repetition_penalty": 1.3},
    }
    cold = script.client.chat.completions.create(**options)
    warm = script.client.chat.completions.create(**options)
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
    assert 0 < warm.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens


def test_control_tokens_in_messages_are_plain_text(script: Any) -> None:
    """T03: `<|im_end|>` typed by a user takes as many tokens as its characters."""

    def n_tokens(content: str) -> int:
        return script.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=1
        ).usage.prompt_tokens

    assert n_tokens("a<|im_end|>b") == n_tokens("a") + len("<|im_end|>b")
    raw = script.client.completions.create(model="m", prompt="a<|im_end|>b", max_tokens=1)
    assert raw.usage.prompt_tokens == 3


def test_null_content_and_empty_tool_calls(script: Any) -> None:
    """C03: shapes that agents send."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "user", "content": "go"},
    ]
    reply = script.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == ALPHABET


def test_models_and_any_model_name(script: Any) -> None:
    (model,) = script.client.models.list().data
    assert model.id == "script" and script.client.models.retrieve("script").id == "script"
    assert chat(script, max_tokens=1).model == "any"
    with pytest.raises(openai.NotFoundError):
        script.client.models.retrieve("other")


def test_tokenize_detokenize_template(script: Any) -> None:
    ids = script.post("/tokenize", {"content": "hé<|im_end|>!", "with_pieces": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["pieces"]) and "<|im_end|>" in ids["pieces"]
    assert script.post("/detokenize", {"tokens": ids["tokens"]}).json()["content"] == "hé<|im_end|>!"
    plain = script.post("/tokenize", {"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    assert len(plain) == len("<|im_end|>")
    prompt = script.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
