"""A model larger than its memory runs, experts and requests trade pages, and the pool is resized while requests run:
the answers are those of a run with plenty of memory, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import ContextLengthError, NotEnoughMemoryError
from rimuru.engine.resolve import piece_lengths, request_bytes
from rimuru.memory.move_budget import MoveBudget
from tools.make_random_gguf import write_random_model

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "random.gguf"
    write_random_model(path, arch="qwen3moe", quant="q8_0", seed=3, context_length=512)
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    with LLM(model, device="cpu") as llm:
        return [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]


def least_memory(model: Path) -> int:
    """Weights, scratch and a pool of a third of the experts."""
    with LLM(model, device="cpu", max_step_tokens=64, max_sequences=8) as llm:
        report = llm.memory()
        experts = report["views"]["expert"]["bytes"]
        return report["dense_bytes"] + report["scratch_bytes"] + report["views"]["buffer"]["bytes"] + experts // 3


def test_a_model_larger_than_its_memory_answers_the_same(model: Path, answers: list[list[int]]) -> None:
    memory = least_memory(model)
    with LLM(model, device="cpu", memory=memory, max_step_tokens=64, max_sequences=8) as llm:
        report = llm.memory()
        assert report["total_bytes"] <= memory
        assert 0 < sum(report["resident_experts"]) < llm.loaded.layout.expert.n_experts
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
        assert llm.loaded.store is not None and llm.loaded.store.counters.n_read > 0
        llm.loaded.engine.audit()


@pytest.mark.parametrize("resident", [0, 1, 0.25, 1.0])
def test_any_share_of_resident_experts_answers_the_same(model: Path, answers: list[list[int]], resident: float) -> None:
    with LLM(model, device="cpu", resident_experts=resident) as llm:
        n_experts = llm.loaded.layout.expert.n_experts
        expected = resident if isinstance(resident, int) else round(resident * n_experts)
        assert sum(llm.memory()["resident_experts"]) == expected
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
        assert sum(llm.memory()["resident_experts"]) == expected
        llm.loaded.engine.audit()


def test_experts_give_way_to_requests_and_come_back(model: Path, answers: list[list[int]]) -> None:
    with LLM(model, device="cpu", memory=least_memory(model), max_step_tokens=64, max_sequences=8) as llm:
        before = sum(llm.memory()["resident_experts"])
        long = [list(range(1, 200)) for _ in range(6)]
        llm.generate([[i, *p[1:]] for i, p in enumerate(long)], SamplingParams(max_tokens=40, temperature=0.0))
        during = llm.loaded.room.n_shrunk
        assert during > 0, "six long requests must have taken pages from experts"
        llm.loaded.engine.cache.evict_prefix(1 << 20)
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
        assert sum(llm.memory()["resident_experts"]) > before - during
        llm.loaded.engine.audit()


def test_resizing_while_requests_run_keeps_the_answers(model: Path, answers: list[list[int]]) -> None:
    with LLM(model, device="cpu", memory=2 * least_memory(model), max_step_tokens=64, max_sequences=8) as llm:
        engine = llm.loaded.engine
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        rng = np.random.default_rng(0)
        low, high = least_memory(model), 3 * least_memory(model)
        sizes = []
        while any(not s.is_finished for s in sequences):
            engine.step()
            llm.resize(int(rng.integers(low, high)))
            engine.audit()
            sizes.append(llm.memory()["pool_bytes"])
        assert [s.output_ids for s in sequences] == answers
        assert min(sizes) < max(sizes)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_pool_shrinks_in_pieces_while_requests_run(
    model: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """No step waits for more moves than it may, here one huge page's. Ended early, or by a copy that fails, the pool is
    as large as it was; whoever asks again gets what was asked for."""
    with LLM(model, device="cpu", memory=3 * least_memory(model), max_step_tokens=64, max_sequences=8) as llm:
        loaded, engine, pool = llm.loaded, llm.loaded.engine, llm.loaded.pool
        engine.overlaps = overlaps
        pool.moves = MoveBudget(1)
        copy, moved, may_fail, outcomes = pool.copier.copy_within, [0], [False], []

        def counted(target: int, source: int, n_bytes: int) -> None:
            if may_fail[0]:
                raise OSError("no copy")
            moved[0] += n_bytes
            copy(target, source, n_bytes)

        monkeypatch.setattr(pool.copier, "copy_within", counted)
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        before = pool.total_bytes
        while any(not s.is_finished for s in sequences):
            engine.step()
            wanted, n_pieces = ["ended", "failed", "done"][len(outcomes) % 3], 0
            pieces = loaded.resize_steps(2 * least_memory(model))
            try:
                for _ in pieces:
                    assert 0 < moved[0] <= pool.layout.huge_bytes and pool.total_bytes == before
                    n_pieces += 1
                    engine.audit()
                    engine.step()
                    engine.audit()
                    moved[0], may_fail[0] = 0, wanted == "failed"
                    if wanted == "ended":
                        pieces.close()
            except OSError:
                assert may_fail[0]
            moved[0], may_fail[0] = 0, False
            engine.audit()
            assert (pool.total_bytes < before) == (wanted == "done" or not n_pieces)
            llm.resize(3 * least_memory(model))
            assert pool.total_bytes == before
            outcomes.append((wanted, n_pieces))
        assert [s.output_ids for s in sequences] == answers
        for wanted in ("ended", "failed", "done"):
            assert max(n for name, n in outcomes if name == wanted) >= 1 + 2 * (wanted == "done")


def test_a_host_one_step_behind_answers_the_same(model: Path, answers: list[list[int]]) -> None:
    """The overlapped loop that devices use, here over the CPU's verbs, with pages moving and requests cancelled."""
    with LLM(model, device="cpu", memory=least_memory(model), max_step_tokens=64, max_sequences=5) as llm:
        engine = llm.loaded.engine
        engine.overlaps = True
        rng = np.random.default_rng(1)
        sequences = [engine.add(p, GREEDY) for p in PROMPTS]
        doomed = [engine.add(p[::-1], GREEDY) for p in PROMPTS]
        while any(not s.is_finished for s in sequences):
            engine.step()
            if doomed and rng.random() < 0.3:
                engine.abort(doomed.pop())
            if rng.random() < 0.2:
                llm.resize(int(rng.integers(least_memory(model), 2 * least_memory(model))))
        assert [s.output_ids for s in sequences] == answers
        for sequence in doomed:
            engine.abort(sequence)
        while engine.has_work:
            engine.step()
        engine.audit()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_pool_made_smaller_holds_shorter_requests(model: Path, overlaps: bool) -> None:
    """Who is longer by then ends by its length, as at a start with so little memory, and not by an error; later ones
    are told what the context is; and it comes back."""
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    with LLM(model, device="cpu", memory=2 * least_memory(model), max_step_tokens=64, max_sequences=8) as llm:
        engine, start = llm.loaded.engine, llm.loaded
        engine.overlaps = overlaps
        most, whole = engine.context_length, llm.generate(PROMPTS[:3], long)
        assert all(len(answer.token_ids) == 400 for answer in whole)
        least = start.dense_bytes + start.scratch_bytes + start.least_pool_bytes
        sequences = [engine.add(p, long) for p in PROMPTS[:3]]
        while sequences[0].n_output < 300:
            engine.step()
        late = engine.add([5] * 300, long)
        llm.resize(least)
        fewer = engine.context_length
        assert 128 <= fewer < 300 and llm.context_length == fewer
        while engine.has_work:
            engine.step()
        engine.audit()
        for sequence, answer in zip(sequences, whole, strict=True):
            assert sequence.finish_reason == "length" and sequence.error is None and sequence.n_output >= 290
            assert sequence.output_ids == answer.token_ids[: sequence.n_output]
        assert isinstance(late.error, NotEnoughMemoryError) and "made smaller" in str(late.error)
        assert late.is_finished and not late.n_output
        with pytest.raises(ContextLengthError, match="resize"):
            llm.generate([[5] * fewer], GREEDY)
        (short,) = llm.generate(PROMPTS[:1], long)
        assert short.finish_reason == "length" and short.token_ids == whole[0].token_ids[: fewer - len(PROMPTS[0])]
        llm.resize(2 * least_memory(model))
        assert engine.context_length == most
        assert [a.token_ids for a in llm.generate(PROMPTS[:3], long)] == [a.token_ids for a in whole]


@pytest.mark.parametrize("policy", ["paper", "cost"])
def test_the_context_respects_how_many_experts_may_leave(model: Path, policy: str) -> None:
    """A request as long as is promised runs, and the limit holds meanwhile; a start that leaves no request room names
    the limit, and so does nothing else that would take what may not leave."""
    options = {"device": "cpu", "max_step_tokens": 64, "max_sequences": 8, "policy": policy}
    with LLM(model, **options) as llm:
        report, layout = llm.memory(), llm.loaded.layout
        beside = report["dense_bytes"] + report["scratch_bytes"] + report["views"]["buffer"]["bytes"]
    experts, limit = layout.expert, layout.expert.n_experts // 3
    stay_bytes = (experts.n_experts - limit) * experts.max_pages * experts.page_bytes
    memory = beside + stay_bytes + request_bytes(layout, 300) + layout.huge_bytes
    with LLM(model, memory=memory, expert_offload_limit=limit, **options) as llm:
        room, most = llm.loaded.room, llm.context_length
        assert 200 < most < 512
        (whole,) = llm.generate([[5] * (most - 20)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        assert len(whole.token_ids) == 20
        n_absent = experts.n_experts - llm.loaded.store.residency.n_resident
        assert n_absent <= limit and room.n_shrunk > 0
        least = llm.loaded.dense_bytes + llm.loaded.scratch_bytes + llm.loaded.least_pool_bytes
        assert least > beside + stay_bytes
        with pytest.raises(NotEnoughMemoryError, match=r"may not leave.*--expert-offload-limit.*resize to"):
            llm.resize(least - layout.huge_bytes)
        llm.resize(memory - layout.huge_bytes)
        assert 128 <= llm.context_length < most
        llm.loaded.engine.audit()
    with pytest.raises(NotEnoughMemoryError, match=f"--expert-offload-limit {limit}.* a higher --expert-offload-limit"):
        LLM(model, memory=beside + stay_bytes // 2, expert_offload_limit=limit, **options)


def test_an_impossible_resize_changes_nothing(model: Path, answers: list[list[int]]) -> None:
    with LLM(model, device="cpu", max_step_tokens=64, max_sequences=8) as llm:
        before = llm.memory()
        for size in ("1KiB", "4TiB"):
            with pytest.raises(NotEnoughMemoryError):
                llm.resize(size)
        assert llm.memory() == before
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers


def test_converted_experts_answer_the_same(model: Path, answers: list[list[int]], tmp_path: Path) -> None:
    from rimuru.cli import main

    out = tmp_path / "blob.rimuru"
    assert main(["convert", str(model), "-o", str(out), "--verify"]) == 0
    for resident in (None, 0):
        with LLM(out, device="cpu", resident_experts=resident) as llm:
            assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers


def test_a_file_without_tokenizer_works_with_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rimuru.base.errors import BadInputError
    from rimuru.cli import main

    path = tmp_path / "ids.gguf"
    write_random_model(path, arch="llama", quant="f16", seed=1, tokenizer=False)
    with LLM(path, device="cpu") as llm:
        answer = llm.generate([3, 4, 5], GREEDY)[0]
        assert len(answer.token_ids) == 24 and answer.text == ""
        with pytest.raises(BadInputError, match="token ids"):
            llm.generate("text")
    assert main(["run", str(path), "--token-ids", "3 4 5", "-n", "24", "--temp", "0", "--ignore-eos", "-q"]) == 0
    assert [int(i) for i in capsys.readouterr().out.split()] == answer.token_ids


def test_scratch_shrinks_before_a_budget_is_refused(model: Path, answers: list[list[int]]) -> None:
    """Shorter pieces of prompts need less scratch. Pieces whose length was asked for stay as they are."""
    with LLM(model, device="cpu", max_sequences=8) as llm:
        report, longest = llm.memory(), llm.loaded.resolved.max_step_tokens
        assert longest == 512
        memory = report["dense_bytes"] + report["scratch_bytes"]  # nothing is left for the pool
    with pytest.raises(NotEnoughMemoryError):
        LLM(model, device="cpu", memory=memory, max_sequences=8, max_step_tokens=longest)
    with LLM(model, device="cpu", memory=memory, max_sequences=8) as llm:
        report = llm.memory()
        assert report["total_bytes"] <= memory and report["scratch_bytes"] <= report["pool_bytes"]
        assert 32 <= llm.loaded.resolved.max_step_tokens < longest
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
    assert piece_lengths(512, 8, False) == [512, 256, 128, 64, 32] and piece_lengths(512, 100, False)[-1] == 128


def test_a_step_holds_every_sequence_however_short_pieces_are(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device pads its steps, to as many sequences as may run: the scratch holds them. Here the scheduler fills it."""
    prompts = [[token] for token in range(3, 27)]
    with LLM(model, device="cpu", max_step_tokens=8, max_sequences=24) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        engine, sizes = llm.loaded.engine, []
        run = engine.runner.run
        monkeypatch.setattr(engine.runner, "run", lambda batch: (sizes.append(batch.n_tokens), run(batch))[1])
        monkeypatch.setattr(engine.scheduler, "max_step_tokens", 24)
        assert [answer.token_ids for answer in llm.generate(prompts, GREEDY)] == expected
        assert max(sizes) == 24
