"""The whole engine on a GPU: placement, batch and residency never change a result; nothing allocates while serving."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.2, seed=5, top_p=0.95, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(8)]
ARCHITECTURES = (
    "qwen3moe", "qwen35moe", "qwen3next", "granitehybrid", "nemotron_h_moe", "jamba", "lfm2moe", "gpt-oss", "deepseek2",
)  # fmt: skip
SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'


@pytest.fixture(scope="module", params=["qwen3moe", "qwen35moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / f"{request.param}.gguf"
    write_random_model(path, arch=request.param, quant="q4_k", seed=3, context_length=1024)
    return path


def open_model(model: Path, **options: object) -> LLM:
    more: dict[str, object] = {"memory": "1GiB", "max_sequences": 8, "max_step_tokens": 128} | options
    return LLM(model, device="cuda", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 96])
def test_placement_never_changes_a_bit(model: Path, chunk: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 96).tolist()
    found = []
    for resident in (1.0, 0.5, 0):
        with open_model(model, resident_experts=resident) as llm:
            found.append(llm.logits(tokens, chunk=chunk))
    assert np.isfinite(found[0]).all()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("any") / f"{request.param}.gguf"
    return write_random_model(path, arch=request.param, quant="q4_k", seed=3, context_length=1024)


def test_deterministic_answers_do_not_depend_on_batch_or_pieces(any_model: Path) -> None:
    """Prompts together in steps of up to 128 tokens, and alone; one prompt in pieces of 1 to 96 tokens."""
    with open_model(any_model, deterministic=True, prefix_cache=False) as llm:
        for params in (GREEDY, DRAWN):
            together = [a.token_ids for a in llm.generate(PROMPTS, params)]
            assert together == [llm.generate([p], params)[0].token_ids for p in PROMPTS]
        tokens = np.random.default_rng(0).integers(0, 200, 96).tolist()
        expected = llm.logits(tokens, chunk=96)
        assert np.isfinite(expected).all()
        for chunk in (1, 2, 7, 16, 64):
            assert np.array_equal(llm.logits(tokens, chunk=chunk), expected), chunk


def test_deterministic_answers_in_a_large_batch(model: Path) -> None:
    """130 sequences: decode steps of more than 128 tokens take the kernels that prompts take."""
    prompts = [[1 + i % 190, 2 + i // 3, 9, 4 + i % 7][: 1 + i % 4] for i in range(130)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with open_model(model, deterministic=True, prefix_cache=False, max_sequences=130, max_step_tokens=256) as llm:
        together = [a.token_ids for a in llm.generate(prompts, params)]
        for i in (0, 1, 63, 64, 65, 128, 129):
            assert llm.generate([prompts[i]], params)[0].token_ids == together[i], i


@pytest.mark.parametrize("memory", ["1GiB", "tight"])
def test_poisoned_pages_never_show(model: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M01: pages that are given back are filled with NaN patterns and issued again, as KV, states and experts."""
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        expected = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
        report = llm.memory()
    if memory == "tight":
        needed = report["dense_bytes"] + report["scratch_bytes"] + report["views"]["buffer"]["bytes"]
        granted: int | str = needed + 2 * report["views"]["expert"]["bytes"] // 3 + (2 << 20)
    else:
        granted = memory
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    for prefix_cache in (False, True):
        with open_model(model, deterministic=True, prefix_cache=prefix_cache, memory=granted) as llm:
            assert llm.loaded.pool._poisons
            for _ in range(2):
                assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == expected


def test_graphs_survive_moving_experts_and_resizing(model: Path) -> None:
    """The pool shrinks and grows, experts leave and come back, and captured graphs answer as before."""
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        expected = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        loaded, engine = llm.loaded, llm.loaded.engine
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        rng, step = np.random.default_rng(1), 0
        while any(not s.is_finished for s in sequences):
            engine.step()
            step += 1
            if loaded.store is not None and step % 3 == 0:
                loaded.store.shrink(int(rng.integers(1, 6)))
            if loaded.store is not None and step % 5 == 0:
                loaded.store.expand(int(rng.integers(1, 6)))
            if step % 7 == 0:
                llm.resize(int(rng.integers(500, 1100)) << 20)
        assert [s.output_ids for s in sequences] == expected
        assert loaded.ops.graphs.n_graphs > 0, "decode must have been captured"
        if loaded.store is not None:
            loaded.store.finish_reads()
        engine.audit()


@pytest.mark.alone
def test_nothing_allocates_device_memory_after_the_start(model: Path) -> None:
    """The driver's own figure before and after the largest batch and the longest prompt."""
    import cupy

    with open_model(model, context=1024) as llm:
        report = llm.memory()
        assert report["total_bytes"] <= 1 << 30
        short = [[i + 1, 2, 3] for i in range(8)]
        llm.generate(short, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))  # loads kernels and graphs
        llm.loaded.ops.synchronize()
        gc.collect()  # what other tests and the start have left behind must not hide what is taken now
        free_before, _ = cupy.cuda.runtime.memGetInfo()
        used_before = cupy.get_default_memory_pool().used_bytes()
        long = [np.random.default_rng(i).integers(0, 200, 900).tolist() for i in range(8)]
        llm.generate(long, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        free_after, _ = cupy.cuda.runtime.memGetInfo()
        assert cupy.get_default_memory_pool().used_bytes() <= used_before
        assert free_before - free_after <= 64 << 20, "graphs of further batch sizes may take a little, nothing else"


@pytest.mark.parametrize("slow", ["copies", "kernels", "both"])
def test_a_slow_stream_changes_nothing(model: Path, slow: str) -> None:
    """R01: expert copies or kernels are delayed by a spinning kernel; tables flip only when copies have happened, and
    pages are written only when their last readers have. Few experts stay, so that pages change hands in every step."""
    import cupy

    spin = cupy.RawKernel(SPIN, "spin")
    with open_model(model, deterministic=True, prefix_cache=False, resident_experts=1.0) as llm:
        expected = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        store, engine, ops = llm.loaded.store, llm.loaded.engine, llm.loaded.ops
        assert store is not None
        store.shrink(16)
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        while any(not s.is_finished for s in sequences):
            store.shrink(6)
            for stream in ([] if slow == "kernels" else [store.copier.stream]) + (
                [] if slow == "copies" else [ops.stream]
            ):
                with stream:
                    spin((1,), (1,), (10_000_000,))
            store.expand(6)
            engine.step()
        assert [s.output_ids for s in sequences] == expected
        store.finish_reads()
        engine.audit()
