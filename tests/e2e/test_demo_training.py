"""The scripts that made the demo model: tales, cleaning, the model in PyTorch against this engine, exact resumption."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru import LLM

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "demo_model"
SMALL = {
    "width": 64, "n_layers": 4, "n_experts": 8, "top_k": 2, "expert_width": 32, "shared_width": 32, "n_head": 2,
    "n_head_kv": 1, "head_dim": 32, "n_rot": 16, "n_key_heads": 1, "n_value_heads": 2, "state_dim": 32,
}  # fmt: skip
N_VOCAB = 259


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    found.set_num_threads(1)
    return found


# ---- text
def test_tales_are_whole_sentences_and_the_same_every_time() -> None:
    from tales import HELD_OUT_PLOTS, plots, tale

    told = [tale(i) for i in range(1200)]
    assert [t.text for t in told[:50]] == [tale(i).text for i in range(50)]
    assert {t.plot for t in told} == set(plots()) - set(HELD_OUT_PLOTS)
    new = [tale(i, held_out=True) for i in range(60)]
    assert {t.plot for t in new} == set(HELD_OUT_PLOTS)
    wrong = re.compile(r"[\[\]{}|=#]|  |\ba [aeio]|\bA [aeio]|\ba an?\b|,[,.]|\bthe the\b|(?:^|\n|[.] )\"?[a-z]")
    for story in told + new:
        assert not wrong.search(story.text), story
        assert not set("[]{}|=#") & set(story.request) and "  " not in story.request, story
        assert story.text[-1] in '.!?"' and story.text.lstrip('"')[0].isupper(), story
    assert len({t.text for t in told}) == 1200


def test_an_opening_and_a_plot_do_not_tell_the_same_thing_twice() -> None:
    import random

    from tales import Opening, Plot, Slots, expand

    plot = Plot("any", True, "", "{own} {now} {h} met {friend} {there}. {k} saw the {x}.")
    for seed in range(40):
        slots = Slots(random.Random(seed), "any", plot.text)
        slots.flags = "spkx"
        h, k, x = slots["h"], slots["k"], slots["x"]
        told = expand(f"{{h}}, {{k}}, {{x}}, {{place}}. {plot.text}", slots)
        h, k = (word[0].upper() + word[1:] for word in (h, k))
        assert told.endswith(f"{h} met {slots['k']} there. {k} saw the {x}.")
    for flags, fits in (("", True), ("x", True), ("s", True), ("k", True), ("c", False), ("n", False), ("u", True)):
        slots = Slots(random.Random(0), "adult", plot.text)
        assert Opening(flags, "").fits(slots, plot) is fits
    assert not Opening("s", "").fits(slots, Plot("any", False, "", "{h} was sad. {now} {he} ran."))
    assert not Opening("x", "").fits(slots, Plot("any", False, "", plot.text))


def test_small_talk_is_answered() -> None:
    from tales import talk

    said = [talk(i) for i in range(200)]
    assert len({t.request for t in said}) > 20
    assert not any(set("[]{}|=") & set(t.request + t.text) for t in said)


def test_choices_with_a_label_agree() -> None:
    import random

    from tales import Slots, expand

    for seed in range(20):
        text = expand("[1=Red|Blue] and [1=red|blue] and [red|blue]", Slots(random.Random(seed)))
        first, second, _ = text.split(" and ")
        assert first.lower() == second


def test_cleaning_keeps_stories_and_drops_what_is_none() -> None:
    from cleaning import cut, distinct, is_good, normalise, wandering
    from tales import tale

    stories = [tale(i).text for i in range(40)]
    assert sum(map(is_good, stories)) > 30
    assert normalise("\u201cHi\u201d \u2013  it\u2019s\n\n me") == '"Hi" - it\'s\nme'
    assert cut('He went home. "Yes," she said. "And') == 'He went home. "Yes," she said.'
    good = next(s for s in stories if is_good(s))
    for bad in (
        good[:100],
        good + " As an AI, I like it.",
        good + " #story",
        good + " He was was was there.",
        good * 9,
    ):
        assert not is_good(bad)
    told = [tale(i).text for i in range(60)]
    assert sum(wandering(text) < float("inf") for text in told) > 20
    loop = "One day, Sue made a castle with Tom. " + "She made it big. She made it tall. She made it wide. " * 4
    assert wandering(loop + "They were happy.") == float("inf")
    assert distinct([good, stories[-1], good + " The end."]) == [0, 1]


def test_requests_are_numbered_and_records_survive_a_kill(tmp_path: Path) -> None:
    from generate import Shard, loops
    from words import request

    assert request(5, 1) == request(5, 1) != request(6, 1)
    assert loops([1, 2, 3, 4] * 30) and not loops(list(range(200)))
    shard = Shard(tmp_path / "stories-0.jsonl.xz", 1 << 20)
    for i in range(3):
        shard.add([i, "stop", f"story {i}"])
        shard.flush()
    shard.add([9, "stop", "lost"])  # never flushed
    again = Shard(shard.path, 1 << 20)
    assert again.last_index() == 2
    with lzma.open(shard.path, "rt") as lines:
        assert [json.loads(line)[0] for line in lines] == [0, 1, 2]


# ---- the model
def test_chunked_delta_rule_is_the_recurrence(torch: Any) -> None:
    from model import delta_rule

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 192, 16, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k + torch.randn(2, 3, 1, 16, dtype=torch.float64), dim=-1)
    g = -torch.rand(2, 3, 192, dtype=torch.float64) * torch.tensor([1e-3, 0.1, 5.0])[None, :, None]
    beta = torch.rand(2, 3, 192, dtype=torch.float64)
    state, out = torch.zeros(2, 3, 16, 16, dtype=torch.float64), []
    for t in range(192):
        state = state * torch.exp(g[:, :, t])[..., None, None]
        wrong = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * wrong[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    expected = torch.stack(out, 2)
    assert torch.allclose(delta_rule(q, k, v, g, beta), expected, atol=1e-12)
    single = delta_rule(*(x.float() for x in (q, k, v, g, beta)))
    assert torch.allclose(single.double(), expected, atol=2e-5)


def test_masked_experts_are_the_routed_ones(torch: Any) -> None:
    from model import DemoModel, DemoShape, experts, rms_norm

    shape = DemoShape(n_vocab=N_VOCAB, **SMALL)
    p = {name: tensor.detach() for name, tensor in DemoModel(shape).layer(0).items()}
    x = torch.randn(1, 9, shape.width)
    found, balance = experts(x, p, shape)
    silu = torch.nn.functional.silu
    m = rms_norm(x, p["post_attention_norm.weight"], shape.eps)[0]
    for token, y in zip(m, found[0], strict=True):
        best, ids = (p["ffn_gate_inp.weight"] @ token).softmax(-1).topk(shape.top_k)
        expected = torch.zeros(shape.width)
        for weight, e in zip(best / best.sum(), ids, strict=True):
            inner = silu(p["ffn_gate_exps.weight"][e] @ token) * (p["ffn_up_exps.weight"][e] @ token)
            expected += weight * (p["ffn_down_exps.weight"][e] @ inner)
        inner = silu(p["ffn_gate_shexp.weight"] @ token) * (p["ffn_up_shexp.weight"] @ token)
        expected += torch.sigmoid(p["ffn_gate_inp_shexp.weight"] @ token) * (p["ffn_down_shexp.weight"] @ inner)
        assert torch.allclose(y, expected, atol=1e-5)
    assert balance > 0


def write_corpus(folder: Path, n_documents: int) -> None:
    """Random documents of a byte tokenizer's ids, in prepare.py's form."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 120, n_documents)
    ids = (rng.integers(3, 40, lengths.sum()) + np.arange(lengths.sum()) % 7).astype(np.uint16)
    (folder / "tokens-00.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes()))
    np.savez(
        folder / "documents.npz", lengths=lengths.astype(np.uint16), sources=np.zeros(n_documents, np.uint8),
        held_out=np.arange(n_documents) % 4 == 0,
    )  # fmt: skip
    (folder / "corpus.json").write_text(json.dumps({"sources": ["tales"], "n_vocab": N_VOCAB}))


def byte_tokenizer(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    from prepare import SPECIAL_TOKENS

    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(path))
    return path


def test_a_run_in_two_parts_is_the_run_and_the_engine_agrees(torch: Any, tmp_path: Path) -> None:
    import train
    from export import export, read_weights
    from model import DemoModel, DemoShape

    write_corpus(tmp_path, 60)
    common = [
        "--data", str(tmp_path), "--device", "cpu", "--no-compile", "--rows", "4", "--length", "64", "--steps", "12",
        "--shape", json.dumps(SMALL), "--log-every", "4", "--evaluate-every", "100",
    ]  # fmt: skip

    def run(name: str, *more: str) -> Path:
        out = tmp_path / name
        train.main([*common, "--state", str(out / "state"), "--out", str(out), *more])
        return out

    whole = run("whole")
    run("parts", "--stop-at", "5")
    parts = run("parts")
    weights, about = read_weights(whole, "moe")
    again, _ = read_weights(parts, "moe")
    assert weights.keys() == again.keys()
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    losses = [row["loss"] for row in about["log"] if "loss" in row]
    assert losses[-1] < losses[0] and about["steps"] == 12

    export(weights, about["shape"], byte_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "m.gguf", "f32", "test")
    model = DemoModel(DemoShape(**about["shape"]))
    for name, tensor in model.gguf_tensors().items():
        tensor.data.copy_(torch.from_numpy(weights[name]))
    ids = np.random.default_rng(1).integers(3, N_VOCAB, 100)
    with torch.no_grad():
        expected = model.logits(torch.from_numpy(ids)[None])[0].numpy()
    with LLM(tmp_path / "m.gguf", device="cpu", memory="64MiB", threads=1) as llm:
        found = llm.logits(ids.tolist(), chunk=37)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max() + 2e-5
