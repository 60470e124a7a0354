"""The whole engine on a GPU: placement, batch and residency never change a result; nothing allocates while serving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(8)]


@pytest.fixture(scope="module", params=["qwen3moe", "qwen35moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / f"{request.param}.gguf"
    write_random_model(path, arch=request.param, quant="q4_k", seed=3, context_length=1024)
    return path


def open_model(model: Path, **options: object) -> LLM:
    return LLM(model, device="cuda", max_sequences=8, max_step_tokens=128, **{"memory": "1GiB", **options})


@pytest.mark.parametrize("chunk", [1, 96])
def test_placement_never_changes_a_bit(model: Path, chunk: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 96).tolist()
    found = []
    for resident in (1.0, 0.5, 0):
        with open_model(model, resident_experts=resident) as llm:
            found.append(llm.logits(tokens, chunk=chunk))
    assert np.isfinite(found[0]).all()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_deterministic_answers_do_not_depend_on_the_batch(model: Path) -> None:
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        together = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
        alone = [llm.generate([p], GREEDY)[0].token_ids for p in PROMPTS]
    assert together == alone


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


def test_nothing_allocates_device_memory_after_the_start(model: Path) -> None:
    """The driver's own figure before and after the largest batch and the longest prompt."""
    import cupy

    with open_model(model, context=1024) as llm:
        report = llm.memory()
        assert report["total_bytes"] <= 1 << 30
        short = [[i + 1, 2, 3] for i in range(8)]
        llm.generate(short, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))  # loads kernels and graphs
        llm.loaded.ops.synchronize()
        free_before, _ = cupy.cuda.runtime.memGetInfo()
        used_before = cupy.get_default_memory_pool().used_bytes()
        long = [np.random.default_rng(i).integers(0, 200, 900).tolist() for i in range(8)]
        llm.generate(long, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        free_after, _ = cupy.cuda.runtime.memGetInfo()
        assert cupy.get_default_memory_pool().used_bytes() == used_before
        assert free_before - free_after <= 64 << 20, "graphs of further batch sizes may take a little, nothing else"


def test_a_slow_copy_stream_changes_nothing(model: Path) -> None:
    """R01: expert copies are delayed by a spinning kernel; tables flip only when the copies have happened."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }', "spin"
    )
    with open_model(model, deterministic=True, prefix_cache=False, resident_experts=1.0) as llm:
        expected = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
    with open_model(model, deterministic=True, prefix_cache=False) as llm:
        store, engine = llm.loaded.store, llm.loaded.engine
        if store is None:
            pytest.skip("a model without experts")
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        while any(not s.is_finished for s in sequences):
            store.shrink(4)
            with store.copier.stream:
                spin((1,), (1,), (10_000_000,))
            store.expand(4)
            engine.step()
        assert [s.output_ids for s in sequences] == expected
        store.finish_reads()
        engine.audit()
