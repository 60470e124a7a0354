"""No request waits for the compiler: what a loaded model may have to run was compiled when it was loaded."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base import env
from rimuru.engine.room import ExpertRoom
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.skipif(env.jit_disabled(), reason="nothing is compiled")

ROOT = str(Path(__file__).resolve().parents[2])
PROMPT = list(range(1, 40))


def compiled() -> set[tuple[str, str]]:
    """(function, argument types) of all that Numba holds ready of this package."""
    from numba.core.dispatcher import Dispatcher

    found = [d for d in gc.get_objects() if isinstance(d, Dispatcher) and d.py_func.__module__.startswith("rimuru.")]
    return {(f"{d.py_func.__module__}.{d.py_func.__name__}", str(types)) for d in found for types in d.overloads}


class EveryOther:
    """A constraint that forbids odd tokens."""

    error: Exception | None = None

    def __init__(self, n_vocab: int) -> None:
        self.mask = np.arange(n_vocab) % 2 == 0

    def allowed(self) -> np.ndarray:
        return self.mask

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == 0


def answer(**options: object) -> Callable[[LLM], object]:
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **options})  # type: ignore[arg-type]
    return lambda llm: llm.generate([PROMPT], params)


def constrained(llm: LLM) -> None:
    engine = llm.loaded.engine
    sequence = engine.add(PROMPT, SamplingParams(max_tokens=3), constraint=EveryOther(engine.n_vocab))
    engine.run_until([sequence])
    assert sequence.error is None and sequence.n_output > 0


def crowd(llm: LLM) -> None:
    """More than the pool holds: experts leave, answers give way, some through host memory."""
    prompts = [[1 + (i * 7 + j) % 50 for j in range(100 + 5 * i)] for i in range(12)]
    llm.generate(prompts, SamplingParams(max_tokens=90, temperature=0.5, ignore_eos=True))
    room = llm.loaded.room
    assert isinstance(room, ExpertRoom) and sum(room.decisions.counts.values()) > 0
    assert llm.loaded.engine.scheduler.n_preemptions > 0 or room.policy == "cost"


def resized(llm: LLM) -> None:
    total = llm.memory()["total_bytes"]
    llm.resize(total - llm.loaded.layout.huge_bytes)
    llm.generate([PROMPT], SamplingParams(max_tokens=3))
    llm.resize(total)


KINDS: dict[str, Callable[[LLM], object]] = {
    "greedy": answer(temperature=0),
    "sampled": answer(temperature=1.0),
    "top k": answer(top_k=5),
    "top p": answer(top_p=0.5),
    "min p": answer(min_p=0.1),
    "repetition penalty": answer(temperature=0, repetition_penalty=1.3),
    "presence penalty": answer(presence_penalty=0.5),
    "frequency penalty": answer(frequency_penalty=0.5),
    "logit bias": answer(logit_bias={3: 1.0}),
    "log-probabilities": answer(logprobs=3),
    "several answers": answer(n=3),
    "a known prefix": lambda llm: llm.generate([[*range(1, 200), tail] for tail in (5, 6)]),
    "a constraint": constrained,
    "streamed": lambda llm: list(llm.stream(PROMPT, SamplingParams(max_tokens=3))),
    "logits in pieces": lambda llm: llm.logits(PROMPT, chunk=7),
    "more than fits": crowd,
    "resized": resized,
}


def compiled_late(path: str, memory: str, policy: str) -> dict[str, list[str]]:
    """Kind of request -> functions that were compiled, or read from the cache of compiled code, because of it."""
    late: dict[str, list[str]] = {}
    with LLM(path, device="cpu", memory=memory, policy=policy, swap="2MiB") as llm:
        ready = compiled()
        assert len(ready) > 20
        for kind, run in KINDS.items():
            run(llm)
            now = compiled()
            if now - ready:
                late[kind] = sorted(name for name, _ in now - ready)
            ready = now
    return late


@pytest.mark.parametrize(
    ("arch", "memory", "policy"), [("qwen3moe", "7MiB", "paper"), ("granitehybrid", "12MiB", "cost")]
)
def test_requests_of_all_kinds_compile_nothing(arch: str, memory: str, policy: str, tmp_path: Path) -> None:
    """In a process of its own: other tests have compiled what this one must not."""
    path = write_random_model(tmp_path / "model.gguf", arch, context_length=512)
    command = [sys.executable, __file__, str(path), memory, policy]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ROOT}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == {}


if __name__ == "__main__":
    print(json.dumps(compiled_late(*sys.argv[1:])))
