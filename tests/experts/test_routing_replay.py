"""Recorded and synthetic routing in place of the router's choice: what runs, how it is labelled, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import BadInputError
from rimuru.batch import Batch
from rimuru.cli import main
from rimuru.commands import bench as bench_module
from rimuru.commands.bench import routing_label, use_routing
from rimuru.experts.replay import Recording, RoutingReplay, load_recording, record_router, save_recording
from rimuru.experts.routing import SyntheticRouter, router_for
from rimuru.plan import PlannedTokens
from rimuru.request import Sequence
from tools.make_random_gguf import write_random_model

TEXT = "The pool is one range of addresses. When many requests run, it lends pages to their states. " * 3
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "random.gguf"
    return write_random_model(path, arch="qwen3moe", quant="q8_0", seed=5, context_length=256)


def a_sequence(seq_id: int, n_cached: int) -> Sequence:
    sequence = Sequence(seq_id, [1] * 100, 100, SamplingParams(), np.random.default_rng(0), frozenset(), 200)
    sequence.n_cached = n_cached
    return sequence


def test_sequences_read_their_own_part_and_go_round() -> None:
    recording = Recording(np.arange(20, dtype=np.int32).reshape(20, 1, 1), 32, "test", 8)
    replay = RoutingReplay(recording)
    first = replay.ids_of([PlannedTokens(a_sequence(7, 0), 3, False), PlannedTokens(a_sequence(9, 0), 2, False)])
    assert first.ravel().tolist() == [0, 1, 2, 8, 9] and first.dtype == np.int32
    later = replay.ids_of([PlannedTokens(a_sequence(9, 10), 4, False), PlannedTokens(a_sequence(7, 3), 1, True)])
    assert later.ravel().tolist() == [18, 19, 0, 1, 3]
    again = replay.ids_of([PlannedTokens(a_sequence(9, 0), 2, False)])  # run once more after a preemption
    assert again.ravel().tolist() == [8, 9]
    assert recording.start(2) != recording.start(0)


def test_streams_on_a_topic_share_more_experts() -> None:
    def overlap(n_topics: int | None) -> float:
        router = SyntheticRouter(2, 64, 4, router_for(64), 3, n_topics)
        ids = record_router(router, 2, 60, "test").ids.reshape(2, 60, 2, 4)
        return float(np.mean([np.isin(ids[0, t, s], ids[1, t, s]).mean() for t in range(60) for s in range(2)]))

    assert overlap(1) > 2 * overlap(None)


@pytest.mark.parametrize("memory_share", [1.0, 0.5])
def test_the_step_uses_the_recording(model: Path, memory_share: float) -> None:
    with LLM(model, device="cpu") as llm:
        memory = int(llm.memory()["total_bytes"] * memory_share)
    with LLM(model, device="cpu", memory=memory, max_step_tokens=32, max_sequences=4) as llm:
        use_routing(llm, "synthetic", "auto", None, 4, 64, 1)
        replay = llm.loaded.engine.replay
        assert replay is not None and routing_label(llm) == "synthetic qwen3-30b"
        seen: list[np.ndarray] = []
        llm.loaded.engine.runner.model.tap.chosen = lambda slot, ids: seen.append(ids.copy()) if slot == 1 else None
        llm.generate([5] * 50, GREEDY)
        # the prompt in two pieces, then 11 tokens of answer that are run
        assert np.array_equal(np.concatenate(seen), replay.recording.ids[: 50 + 11, 1])
        llm.loaded.engine.audit()


def test_answers_under_a_replay_do_not_depend_on_memory(model: Path) -> None:
    prompts = [[1 + i, 7, 30 + i, 99] * 5 for i in range(8)]
    answers, totals = [], []
    for share in (1.0, 0.6):
        memory = int(totals[0] * share) if totals else None
        with LLM(model, device="cpu", memory=memory, max_step_tokens=32, max_sequences=8) as llm:
            totals.append(llm.memory()["total_bytes"])
            use_routing(llm, "synthetic", "auto", None, 8, 64, 1)
            answers.append([a.token_ids for a in llm.generate(prompts, GREEDY)])
            use_routing(llm, "model", "auto", None, 8, 64, 1)
            answers.append([a.token_ids for a in llm.generate(prompts, GREEDY)])
    assert answers[0] == answers[2] and answers[1] == answers[3] and answers[0] != answers[1]


def test_a_text_replayed_with_its_own_recording_is_as_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "routing.npz"
    text.write_text(TEXT)
    command = ["profile", str(model), "-f", str(text), "-o", str(tmp_path / "p.json"), "--record", str(file)]
    assert main([*command, "--device", "cpu", "--quiet"]) == 0
    with LLM(model, device="cpu") as llm:
        ids = llm.tokenize(TEXT)[:200]
        want = llm.logits(ids)
        use_routing(llm, str(file), "auto", None, 1, len(ids), 0)
        assert routing_label(llm).startswith("recorded, routing.npz: ")
        assert np.array_equal(llm.logits(ids), want)
        assert not np.array_equal(llm.logits(ids), want)  # the second sequence reads another part


def test_bench_labels_its_routing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["bench", str(model), "--device", "cpu", "--prefill", "20", "--streams", "2", "--new", "6", "--repeats", "1"]
    base += ["--ctx", "128", "--json", "--quiet"]
    for more, label in (
        ([], "model"),
        (["--routing", "synthetic"], "synthetic qwen3-30b"),
        (["--routing", "synthetic", "--router", "glm-5.2", "--topics", "1"], "synthetic glm-5.2, 1 topics"),
    ):
        assert main([*base, *more]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["routing"] == label and result["decode_tokens_per_second"]["2"] > 0


BENCH = ["--device", "cpu", "--prefill", "20", "--streams", "1", "--new", "4", "--repeats", "1", "--ctx", "128", "-q"]


def test_a_routing_that_cannot_be_used_is_refused_before_weights_are_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded in vain")

    monkeypatch.setattr(bench_module, "open_llm", loads)
    damaged, other = tmp_path / "damaged.npz", tmp_path / "other.npz"
    save_recording(damaged, np.zeros((400, 3, 2), np.int32), 8, "text")
    damaged.write_bytes(damaged.read_bytes()[:-20])
    save_recording(other, np.zeros((4, 77, 2), np.int32), 8, "text")
    dense = write_random_model(tmp_path / "dense.gguf", arch="llama", quant="q8_0")
    for path, words, needle in (
        (model, ["--routing", str(tmp_path / "none.npz")], "none.npz"),
        (model, ["--routing", str(tmp_path)], "directory"),
        (model, ["--routing", "synthetix"], "model, synthetic"),
        (model, ["--routing", str(damaged)], "no recorded routing"),
        (model, ["--routing", str(other)], "77"),
        (model, ["--routing", "synthetic", "--router", "NOPE"], "unknown router 'NOPE'"),
        (model, ["--router", "glm-5.2"], "--router"),
        (model, ["--topics", "3"], "--topics"),
        (model, ["--routing", str(other), "--topics", "3"], "--topics"),
        (dense, ["--routing", "synthetic"], "layers of experts"),
    ):
        assert main(["bench", str(path), *BENCH, *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert needle in line and "internal error" not in line


def test_any_whole_number_is_a_seed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n20,4\n")
    for seed in ("-1", str(1 << 70)):
        assert main(["bench", str(model), *BENCH, "--routing", "synthetic", "--seed", seed]) == 0
        simulate = ["simulate", str(model), "--trace", str(trace), "--memory", "1GiB", "--rate", "5", "--json"]
        capsys.readouterr()
        assert main([*simulate, "--seed", seed]) == 0
        assert json.loads(capsys.readouterr().out)["seed"] == int(seed)


def test_padded_rows_use_the_first_rows_experts() -> None:
    from rimuru.ops.cuda.graphs import pad_decode

    ends = np.arange(4, dtype=np.int32)
    batch = Batch(
        ends[:3], ends[:3], ends[:3], ends, ends[1:], np.zeros((1, 3, 1), np.int32), np.zeros((3, 0), np.int32),
        np.zeros((3, 0), np.int32), np.zeros(3, np.bool_), ends[:3], np.arange(6, dtype=np.int32).reshape(3, 1, 2),
    )  # fmt: skip
    padded = pad_decode(batch, 5, 2).expert_ids
    assert padded is not None and padded[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]


def test_wrong_recordings_are_refused(model: Path, tmp_path: Path) -> None:
    ids = np.zeros((10, 3, 2), np.int32)
    good = tmp_path / "good.npz"
    save_recording(good, ids + 5, 8, "text")
    assert np.array_equal(load_recording(good, 3, 8, 2, 4).ids, ids + 5)
    for layers, experts, top_k, word in ((4, 8, 2, "layers"), (3, 8, 4, "layers"), (3, 5, 2, "outside")):
        with pytest.raises(BadInputError, match=word):
            load_recording(good, layers, experts, top_k, 4)
    noise = tmp_path / "noise.npz"
    for content in (b"", b"PK\x03\x04 broken", b"text"):
        noise.write_bytes(content)
        with pytest.raises(BadInputError, match="no recorded routing"):
            load_recording(noise, 3, 8, 2, 4)
    with pytest.raises(BadInputError, match="cannot read"):
        load_recording(tmp_path / "absent.npz", 3, 8, 2, 4)
    with pytest.raises(BadInputError, match="cannot read"):
        load_recording(tmp_path, 3, 8, 2, 4)
    with LLM(model, device="cpu") as llm, pytest.raises(BadInputError, match="unknown router"):
        use_routing(llm, "synthetic", "nobody", None, 1, 8, 0)


def test_a_damaged_recording_is_refused_whatever_is_damaged(tmp_path: Path) -> None:
    """zlib, zipfile and numpy's reader of headers each raise errors of their own."""
    rng = np.random.default_rng(3)
    path = tmp_path / "routing.npz"
    save_recording(path, rng.integers(0, 8, (400, 3, 2)), 8, "text")
    whole, n_refused = path.read_bytes(), 0
    assert len(whole) > 1000
    for place in [600, *rng.integers(0, len(whole) - 4, 300).tolist()]:
        path.write_bytes(whole[:place] + b"AAAA" + whole[place + 4 :])
        try:
            load_recording(path, 3, 8, 2, 4)
        except BadInputError as error:
            n_refused += 1
            assert str(path) in str(error)
        else:
            assert place != 600
    assert n_refused > 200  # others hit dates and the like
    np.save(bare := tmp_path / "bare.npy", np.zeros((4, 3, 2), np.int32))
    with pytest.raises(BadInputError, match="no recorded routing"):
        load_recording(bare, 3, 8, 2, 4)
