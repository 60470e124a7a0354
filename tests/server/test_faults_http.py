"""Faults that other servers had, over real HTTP, where no other test of this folder has their kind: dirty pages (M01),
states of prefixes (M03), conversations that mix (M09), experts that are overwritten (R01), the order of filters (S01).
Which test covers which row: tests/faults/test_known_faults.py."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_fixtures import Running, running

from rimuru.engine.room import ExpertRoom
from tools.make_random_gguf import write_random_model

DRAWN = {"temperature": 8, "max_tokens": 10, "ignore_eos": True}
"""With the seed as certain as the best tokens of a random model, which all repeat the last one."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("faults") / "hybrid.gguf", "granitehybrid", context_length=512)


def complete(server: Running, prompt: list[int], **options: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", {"prompt": prompt, **DRAWN, "seed": sum(prompt), **options})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def ids_of(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, 200) for _ in range(n)]


def test_dirty_pages_never_show(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M01: released pages are filled with NaN patterns before they hold states, keys, values or experts again."""
    rng = random.Random(1)
    prompts = [ids_of(rng, rng.randrange(20, 120)) for _ in range(10)]
    with running(hybrid, max_step_tokens=64) as server:
        alone = [text_of(complete(server, prompt)) for prompt in prompts]
        report = server.http.get("/v1/memory").json()
        fixed, huge = report["dense_bytes"] + report["scratch_bytes"], server.llm.loaded.layout.huge_bytes
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    with running(hybrid, memory=fixed + 4 * huge, max_step_tokens=64) as server, ThreadPoolExecutor(5) as clients:
        assert server.llm.loaded.pool._poisons
        for _ in range(2):
            assert [text_of(reply) for reply in clients.map(lambda p: complete(server, p), prompts)] == alone
        room = server.llm.loaded.room
        assert isinstance(room, ExpertRoom) and sum(room.decisions.counts.values()) > 0
        server.wait_idle()


def test_shared_beginnings_of_any_length(hybrid: Path) -> None:
    """M03: prompts that share k tokens, k about page and piece ends: answer and log-probabilities of the cold run, and
    a prompt that was never seen reports nothing reused."""
    rng = random.Random(2)
    with running(hybrid, max_step_tokens=64) as server, running(hybrid, prefix_cache=False) as cold:
        (page,) = {group.page_tokens for group in server.llm.loaded.layout.kv.groups}
        first = ids_of(rng, 3 * page + 140)
        assert complete(server, first)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        reused = []
        for k in sorted({1, page - 1, page, page + 1, 2 * page, 63, 64, 65, 128, len(first)}):
            prompt = first[:k] + ids_of(rng, 7)
            warm, fresh = complete(server, prompt, logprobs=2), complete(cold, prompt, logprobs=2)
            assert warm["choices"] == fresh["choices"], k
            details = [reply["usage"].get("prompt_tokens_details") or {} for reply in (warm, fresh)]
            assert details[0]["cached_tokens"] <= k and not details[1].get("cached_tokens")
            reused.append(details[0]["cached_tokens"])
        assert max(reused) > 0
        server.wait_idle()


def test_conversations_stay_apart(hybrid: Path) -> None:
    """M09: a word of its own for each of K clients; every answer is the solo one, also when others leave in between."""
    rng = random.Random(3)
    with running(hybrid, max_sequences=6) as server, ThreadPoolExecutor(16) as clients:
        prompts = [ids_of(rng, 12) * 3 for _ in range(16)]
        alone = [text_of(complete(server, prompt)) for prompt in prompts]
        assert len(set(alone)) == 16
        for k in (1, 2, 3, 4, 8, 16):
            leaving = [server.request_socket({"prompt": prompts[i], "max_tokens": 60}) for i in range(0, k, 3)]
            answers = clients.map(lambda prompt: text_of(complete(server, prompt)), prompts[:k])
            for connection in leaving:
                connection.close()
            assert list(answers) == alone[:k]
        server.wait_idle()


@pytest.mark.parametrize("resident", [0, 2])
def test_experts_that_come_and_go_change_nothing(resident: int, tmp_path: Path) -> None:
    """R01: long prompts of several clients while (nearly) every expert is read into loading buffers that are used again
    at once: the answers with all experts resident."""
    path = write_random_model(tmp_path / "m.gguf", context_length=512)
    rng = random.Random(4)
    prompts = [ids_of(rng, 200 + 10 * i) for i in range(6)]
    with running(path) as server:
        expected = [text_of(complete(server, prompt)) for prompt in prompts]
    with running(path, resident_experts=resident) as server, ThreadPoolExecutor(6) as clients:
        assert [text_of(reply) for reply in clients.map(lambda p: complete(server, p), prompts)] == expected
        assert server.metric("rimuru_expert_read_bytes_total") > 0
        server.wait_idle()


def test_the_temperature_does_not_choose_the_candidates(script: Any) -> None:
    """S01: logits 3, 2, 1 with top_p 0.8 keep two tokens; a temperature of 0.5 before it would keep one."""
    prompt = {"prompt": "0", "max_tokens": 1}
    reply = script.post("/v1/completions", {**prompt, "logprobs": 5, "temperature": 0}).json()
    known = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    texts = list(known)[:3]
    ids = [script.post("/tokenize", {"content": text}).json()["tokens"][0] for text in texts]
    bias = {str(i): 20 + goal - known[text] for i, goal, text in zip(ids, (3, 2, 1), texts, strict=True)}
    drawn: set[str] = set()
    for seed in range(3):
        body = {**prompt, "logit_bias": bias, "top_p": 0.8, "temperature": 0.5, "n": 60, "seed": seed}
        drawn |= {choice["text"] for choice in script.post("/v1/completions", body).json()["choices"]}
    assert drawn == set(texts[:2])
