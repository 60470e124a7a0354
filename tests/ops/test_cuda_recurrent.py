"""CUDA recurrent layers: the cases of every backend, pieces of a prompt, padding rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.common import Case, address_of, compare, make_batch, normal
from cases.pieces import CUTS, VERBS, Recurrent, delta_net, mamba1, mamba2, run_in_pieces
from cases.recurrent import CASES, Tokens, delta_case, mamba1_case, mamba2_case

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.memory.specs import ConvLayout, SsmLayout
from rimuru.ops.base import StateLayer
from rimuru.ops.cuda.graphs import pad_decode

pytestmark = pytest.mark.gpu

LONG = Tokens([300, 17, 1], [300, 40, 5])
MORE = (
    delta_case("long prompt", LONG, DeltaNetSpec(4, 8, 128, 4, "tiled")),
    mamba2_case("long prompt", LONG, Mamba2Spec(256, 128, 4, 1, 4)),
    mamba1_case("long prompt", LONG, Mamba1Spec(200, 16, 8, 4)),
)


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


@pytest.mark.parametrize("case", (*CASES, *MORE), ids=lambda case: case.name)
def test_case(case: Case, ops: Any) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), max(5e-5, 3 * case.tolerance))


LARGE = (
    delta_net(DeltaNetSpec(4, 8, 128, 4, "tiled")),
    mamba2(Mamba2Spec(256, 128, 4, 1, 4)),
    mamba1(Mamba1Spec(200, 16, 8, 4)),
)


@pytest.mark.parametrize("verb", (*VERBS, *LARGE), ids=lambda verb: verb.name)
def test_pieces_and_batches_change_no_bit(verb: Recurrent, ops: Any) -> None:
    """Single tokens take other kernels than prompts (conv_step, a DeltaNet that prepares for itself): equal bits."""
    found = {name: run_in_pieces(verb, ops, pieces) for name, pieces in CUTS.items()}
    expected = found["token by token"]
    assert np.isfinite(expected["out"]).all()
    for name, result in found.items():
        assert np.array_equal(result["out"], expected["out"]), name
        assert np.array_equal(result["pool"], expected["pool"]), name


LONG_AND_SHORT = delta_case(
    "long and short", Tokens([600, 5, 64, 200], [600, 9, 64, 400]), DeltaNetSpec(4, 8, 128, 4, "tiled")
)
OF_64 = delta_case("64 dims", Tokens([700, 129, 192], [900, 129, 192]), DeltaNetSpec(2, 4, 64, 4, "grouped"))
ALL_HEADS = delta_case("all heads", Tokens([193], [300]), DeltaNetSpec(16, 32, 128, 4, "tiled"))


@pytest.mark.parametrize(
    ("case", "gates"),
    [(LONG_AND_SHORT, 1.0), (LONG_AND_SHORT, 1e-3), (OF_64, 1.0), (OF_64, 1e-3), (OF_64, 30.0), (ALL_HEADS, 1.0)],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_long_pieces_go_by_chunks(case: Case, gates: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tolerance of the token-by-token kernel, whose result a deterministic backend keeps."""
    from rimuru.ops.cuda import CudaOps, delta_chunks

    inputs: dict[str, Any] = dict(case.inputs())
    inputs["a"] = inputs["a"] * np.float32(gates)
    runs: list[list[int]] = []
    run = delta_chunks.DeltaChunks.run

    def note(chunks: delta_chunks.DeltaChunks, seqs: list[int], *more: Any) -> None:
        runs.append(seqs)
        run(chunks, seqs, *more)

    monkeypatch.setattr(delta_chunks.DeltaChunks, "run", note)
    want, found = case.expected(inputs), case.run(CudaOps(), inputs)
    n_new = np.diff(inputs["batch"].query_start)
    assert runs == [np.flatnonzero(n_new >= delta_chunks.MIN_TOKENS).tolist()]
    compare(found, want, 5e-5)
    again, fixed = case.run(CudaOps(), inputs), case.run(CudaOps(deterministic=True), inputs)
    monkeypatch.setattr(delta_chunks, "WINDOW_CHUNKS", 3)
    other = case.run(CudaOps(), inputs)
    monkeypatch.setattr(delta_chunks, "WINDOW_CHUNKS", 0)
    by_token = case.run(CudaOps(), inputs)
    assert len(runs) == 3
    for name in want:
        assert np.array_equal(again[name], found[name]) and np.array_equal(other[name], found[name]), name
        assert np.array_equal(fixed[name], by_token[name]) and not np.array_equal(fixed[name], found[name]), name


def test_padding_rows(ops: Any) -> None:
    """Sequences without pages leave the states of the others as they are, and outputs too."""
    rng = np.random.default_rng(0)
    spec = DeltaNetSpec(2, 4, 32, 4, "tiled")
    state_bytes, row_bytes = 4 * 32 * 32 * 4, spec.conv_channels * 4
    batch = make_batch(rng, [1, 1], [5, 9], n_recurrent=1, conv_rows=(3,))
    states, rows = normal(rng, 2, state_bytes // 4), normal(rng, 6, spec.conv_channels)
    inputs = [normal(rng, 4, spec.conv_channels), normal(rng, 4, 4), normal(rng, 4, 4)]
    weight, a, bias = normal(rng, spec.conv_channels, 4), -np.exp(normal(rng, 4)), normal(rng, 4)
    results = []
    for n_seqs in (2, 4):
        padded = pad_decode(batch, n_seqs, 16)
        ssm, conv = ops.upload(states.view(np.uint8)), ops.upload(rows.view(np.uint8))
        ssm_layer = StateLayer(address_of(ssm), SsmLayout(state_bytes, state_bytes, (0,)), 0, None, 0)
        conv_layer = StateLayer(address_of(conv), None, 0, ConvLayout(row_bytes, row_bytes, 3, (0,), "ssm"), 0)
        step = ops.stage(padded)
        u, beta, alpha = (ops.upload(x[:n_seqs]) for x in inputs)
        mixed, out = ops.empty(u.shape, np.float32), ops.empty((n_seqs, 128), np.float32)
        ops.conv_update(u, ops.upload(weight), None, True, step, conv_layer, mixed)
        device = [ops.upload(x) for x in (a, bias)]
        ops.delta_net(mixed, beta, alpha, *device, spec, 1e-6, step, ssm_layer, out)
        results.append((ops.download(out)[:2], ops.download(ssm), ops.download(conv)))
    assert all(np.array_equal(one, two) for one, two in zip(*results, strict=True))
    assert np.isfinite(results[0][0]).all() and not np.array_equal(results[0][1], states.view(np.uint8))
