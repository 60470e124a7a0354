"""The pointwise, attention, recurrent and sampling kernels on the host, against the reference: small shapes."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases import attention as attention_cases
from cases import mla as mla_cases
from cases import pointwise as pointwise_cases
from cases import recurrent as recurrent_cases
from cases import sampling as sampling_cases
from cases import waiting
from cases.attention import AttentionShape, QkvShape, attention_case
from cases.common import Case, compare
from cases.recurrent import Tokens, conv_case, delta_case, mamba1_case, mamba2_case
from cases.sampling import sample_case

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.batch import Batch
from rimuru.engine.rehearse import rehearsal_batches
from rimuru.ops.base import Act, Step
from rimuru.ops.cuda import attention
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler")


class HostArray(np.ndarray):
    """A NumPy array that has its address where CuPy's have it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=self.ctypes.data)


def host(values: np.ndarray) -> np.ndarray:
    return emulate.upload(values).view(HostArray)


class HostStaged:
    """StagedBytes without a device."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def reserve(self, n_bytes: int) -> None:
        """Nothing is kept in one block."""

    def send(self, arrays: Any) -> list[int]:
        self.sent = [host(np.ascontiguousarray(array)) for array in arrays]
        return [int(array.ctypes.data) for array in self.sent]


class EmulatedFamilies:
    """The verbs of these families through their launchers."""

    name = "cuda, emulated"

    def __init__(self, deterministic: bool = False) -> None:
        from rimuru.ops.cuda import attention, embed, head_linear, matmul, pointwise, recurrent, sampling

        for module, verbs in (
            (pointwise, "rms_norm add_norm gated_norm glu multiply row_gate gather_rows finish_logits take_tokens"),
            (attention, "prepare_qkv"),
            (matmul, "linear"),
            (head_linear, "head_linear"),
            (embed, "embed"),
            (recurrent, "conv_update delta_net mamba2 mamba1"),
        ):
            for verb in verbs.split():
                setattr(self, verb, getattr(module, verb))
        self._matmul = matmul
        self.attention = attention.Attention(deterministic)
        self.sample = sampling.Sampler()
        self.sample._staged = HostStaged()  # type: ignore[assignment]

    def weight(self, raw: np.ndarray, fmt: Any, n_in: int) -> Any:
        weight = self._matmul.weight(raw, fmt, n_in)
        weight.data = weight.data.view(HostArray)
        return weight

    def act(self, n_tokens: int, width: int) -> Act:
        return self._matmul.act(n_tokens, width)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return emulate.aligned(shape, dtype).view(HostArray)

    def upload(self, values: np.ndarray) -> np.ndarray:
        return host(values)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def stage(self, batch: Batch) -> Step:
        names = [name for name in Step.__dataclass_fields__ if name != "host"]
        arrays = (getattr(batch, name) for name in names)
        return Step(batch, *(None if array is None else host(array) for array in arrays))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedFamilies]:
    emulator = emulate.Emulator(tmp_path_factory.mktemp("kernels"))
    cupy = emulate.fake_cupy()
    cupy.zeros = lambda shape, dtype: host(np.zeros(shape, dtype))  # type: ignore[attr-defined]
    cupy.float32, cupy.int32, cupy.uint32, cupy.uint64 = np.float32, np.int32, np.uint32, np.uint64  # type: ignore[attr-defined]

    def launch(self: Kernel, grid: Any, block: Any, args: Any, shared_bytes: int = 0, stream: Any = None) -> None:
        assert shared_bytes <= 99 * 1024, self.name  # what a block may have on every supported card
        emulator.launch(self, grid, block, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(Kernel, "__call__", launch)
        yield EmulatedFamilies()


@pytest.mark.parametrize(("n_tokens", "width"), [(4, 96), (5, 96), (6, 512)])
def test_a_norm_leaves_the_halves_that_matrices_read(ops: EmulatedFamilies, n_tokens: int, width: int) -> None:
    """Bit for bit what `scale_halves` makes of its output; another verb that fills the activation takes them back."""
    from rimuru.ops.cuda import matmul

    rng = np.random.default_rng(width)
    x, weight = host(rng.standard_normal((n_tokens, width), np.float32) * 30), host(rng.random(width, np.float32))
    x[1] = 0
    out = matmul.act(n_tokens, width)
    ops.rms_norm(x, weight, 1e-6, out)  # type: ignore[attr-defined]
    assert out.quant.has_halves == (n_tokens > matmul.MAX_GEMV_TOKENS)
    if out.quant.has_halves:
        halves, scales = emulate.aligned((n_tokens, width), np.float16), emulate.aligned((n_tokens,), np.float32)
        matmul.scale_halves(out.f32, halves, scales, n_tokens)
        assert np.array_equal(halves.view(np.uint16), out.quant.halves.view(np.uint16))
        assert np.array_equal(scales, out.quant.half_scales) and len(set(scales.tolist())) > 1
        assert not out.head(2).quant.has_halves
    ops.glu(None, x, "identity", out)  # type: ignore[attr-defined]
    assert not out.quant.has_halves


ATTENTION = [
    attention_case("decode", AttentionShape([1], [300], 8, 1, 128, 128, 72, "f16")),
    attention_case("decode of several", AttentionShape([1] * 3, [1, 17, 66], 16, 2, element="f16")),
    attention_case("decode, window, sinks", AttentionShape([1], [200], 4, 2, element="f16", window=70, sinks=True)),
    attention_case("decode, groups of 16, gate", AttentionShape([1], [40], 16, 1, element="f16", gated=True)),
    attention_case("decode, 256 dims", AttentionShape([1], [35], 8, 1, 256, 256, element="f16")),
    attention_case("decode, 96 and 80 dims", AttentionShape([1], [35], 5, 1, 96, 80, element="f16")),
    attention_case("wide decode, f32", AttentionShape([1, 1], [40, 99], 6, 2)),
    attention_case(
        "latent decode", AttentionShape([1, 1], [300, 65], 16, 1, 160, 0, 27, value_width=128, element="f16")
    ),
    attention_case(
        "latent decode, 5 heads, window, sinks, gate",
        AttentionShape([1], [200], 10, 2, 288, 0, 16, "f16", 70, True, True, 256),
    ),
    attention_case("wide decode, latent keys", AttentionShape([1], [40], 8, 1, 96, 0, value_width=64, element="f16")),
    attention_case("prompt", AttentionShape([30], [70], 8, 2, element="f16", page_tokens=27)),
    attention_case("prompt, 128 dims", AttentionShape([9], [80], 8, 1, 128, 128, 72, "f16")),
    attention_case("prompt, 192 and 128 dims", AttentionShape([9], [40], 4, 1, 192, 128, element="f16", gated=False)),
    attention_case(
        "mixed, window, sinks", AttentionShape([1, 20], [90, 85], 4, 2, element="f16", window=33, sinks=True)
    ),
]
RECURRENT = [
    conv_case("mixed", Tokens([3, 1, 9, 1], [3, 5, 20, 1]), 40, 4, True, True),
    conv_case("decode", Tokens([1, 1], [1, 5]), 40, 4, True, True),
    delta_case("mixed", Tokens([3, 1, 19], [3, 5, 30]), DeltaNetSpec(2, 4, 24, 4, "tiled")),
    delta_case("decode", Tokens([1, 1], [1, 5]), DeltaNetSpec(1, 2, 64, 4, "grouped")),
    mamba2_case("mixed", Tokens([3, 1, 19], [3, 5, 30]), Mamba2Spec(30, 24, 3, 1, 4)),
    mamba2_case("state of 128", Tokens([9], [9]), Mamba2Spec(128, 128, 2, 1, 4)),
    mamba1_case("mixed", Tokens([3, 1, 19], [3, 5, 30]), Mamba1Spec(40, 16, 8, 4)),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(case: Case, ops: EmulatedFamilies) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), 8e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [c for c in waiting.CASES if c.kind == "edge"], ids=lambda case: case.name)
def test_attention_prepares_what_waited(case: Case, ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as of two launches, in the output and in the pages."""
    inputs, launched = case.inputs(), []
    monkeypatch.setattr(ops, "prepare_qkv", ops.attention.prepare_qkv)
    launch = Kernel.__call__

    def note(kernel: Kernel, *args: Any, **named: Any) -> None:
        launched.append(kernel.name)
        launch(kernel, *args, **named)

    monkeypatch.setattr(Kernel, "__call__", note)
    got = case.run(ops, inputs)  # type: ignore[arg-type]
    assert ("prepare_qkv" in launched) == ("float32" in case.name)
    apart = case.run(ops, inputs | {"waits": False})  # type: ignore[arg-type]
    assert "prepare_qkv" in launched and all(np.array_equal(got[name], apart[name]) for name in got)
    compare(got, case.expected(inputs), case.tolerance, case.tolerances)


def attention_kernels(ops: EmulatedFamilies, n_new: list[int], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What a step of so many new tokens of each sequence would launch."""
    case = waiting.waiting_case("any", QkvShape(n_new, n_new, 8, 2, 64, 64, 16, "f16", "head", n_rot=64))
    found: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", lambda kernel, *_, **__: found.add(f"{kernel.name} {kernel.defines}"))
        patch.setattr(ops, "prepare_qkv", ops.attention.prepare_qkv)
        case.run(ops, case.inputs() | {"waits": max(n_new) == 1})  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_rehearsed_steps_have_all_kernels_of_mixed_ones(
    deterministic: bool, ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers beside prompts, few and many: no request waits for a kernel that only such steps use."""
    layout: Any = types.SimpleNamespace(kv=None, ssm=None, conv=None)
    monkeypatch.setattr(ops.attention, "deterministic", deterministic)
    monkeypatch.setattr(attention, "FEW_BLOCKS", 8)
    rehearsed = set().union(
        *(
            attention_kernels(ops, np.diff(batch.query_start).tolist(), monkeypatch)
            for batch in rehearsal_batches(48, [1, 2, 4, 8], layout)
        )
    )
    rng = np.random.default_rng(0)
    for n_seqs in (1, 2, 3, 5, 8, 8):
        n_new = rng.integers(1, 40 // n_seqs + 1, n_seqs)
        for counts in (n_new.tolist(), np.where(np.arange(n_seqs) > 0, 1, n_new + 1).tolist(), [1] * n_seqs):
            assert attention_kernels(ops, counts, monkeypatch) <= rehearsed, counts


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", ["several", "long and short"])
def test_deterministic_blocks_of_few_warps_give_the_bits_of_many(
    name: str, waits: bool, ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query among many goes to blocks of four warps, and one among few to blocks of eight."""
    (case,) = (case for case in waiting.CASES if case.name.endswith(name))
    inputs = case.inputs() | {"waits": waits}
    monkeypatch.setattr(ops, "prepare_qkv", ops.attention.prepare_qkv)

    def run(most_of_many_warps: int, deterministic: bool) -> np.ndarray:
        monkeypatch.setattr(attention, "FEW_BLOCKS", most_of_many_warps)
        monkeypatch.setattr(ops.attention, "deterministic", deterministic)
        return case.run(ops, inputs)["out"]  # type: ignore[arg-type]

    many = run(64, True)
    assert np.array_equal(run(0, True), many) and np.array_equal(run(64, False), many)
    assert not np.array_equal(run(0, False), many)  # four parts of a split in place of eight


@pytest.mark.parametrize("target", [6, 12, 18])
def test_blocks_take_splits_in_turn(target: int, ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two or three blocks a context, the last of which has the token itself: the bits of a block a split."""
    case = next(case for case in waiting.CASES if "long and short" in case.name)
    inputs = case.inputs()
    monkeypatch.setattr(ops, "prepare_qkv", ops.attention.prepare_qkv)
    whole = case.run(ops, inputs)  # type: ignore[arg-type]
    monkeypatch.setattr(attention, "TARGET_BLOCKS", target)
    got = case.run(ops, inputs)  # type: ignore[arg-type]
    assert all(np.array_equal(got[name], whole[name]) for name in whole)


def test_latent_splits_are_folded_alike(ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the block itself where it has a context alone, else by the second kernel: the same bits."""
    from rimuru.ops.cuda import latent

    case = next(case for case in ATTENTION if "latent decode, 5 heads" in case.name)
    other = next(case for case in ATTENTION if case.name == "attention latent decode")
    for chosen in (case, other):
        inputs = chosen.inputs()
        many = chosen.run(ops, inputs)["out"]  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(latent, "TARGET_BLOCKS", 1)
            alone = chosen.run(ops, inputs)["out"]  # type: ignore[arg-type]
        assert np.array_equal(many, alone)


LATENT_PROMPTS = [
    attention_case(
        "prompt, latent keys", AttentionShape([9, 5], [40, 5], 8, 1, 96, 0, 27, value_width=64, element="f16")
    ),
    attention_case(
        "mixed, wide latent keys",
        AttentionShape([1, 7], [30, 70], 16, 1, 160, 0, value_width=96, element="f16", window=40, sinks=True),
    ),
]


@pytest.mark.parametrize("case", LATENT_PROMPTS, ids=lambda case: case.name)
def test_latent_prompts(case: Case, ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are values too, on a card whose blocks have enough shared memory for wide ones."""
    monkeypatch.setattr(ops.attention, "shared_bytes", 227 * 1024)
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), 8e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", attention_cases.QKV_CASES[:-1], ids=lambda case: case.name)
def test_prepare_qkv(case: Case, ops: EmulatedFamilies) -> None:
    if "bf16" in case.name:
        pytest.skip("the host has no bf16 conversions")
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), 2e-5, case.tolerances)  # type: ignore[arg-type]


LATENT = [c for c in (*mla_cases.HEAD_LINEAR_CASES[::3], *mla_cases.LATENT_ROW_CASES[:2]) if c.kind == "edge"]


@pytest.mark.parametrize("case", LATENT, ids=lambda case: case.name)
def test_latent_attention(case: Case, ops: EmulatedFamilies) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), 2e-5, case.tolerances)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "n_in"), [("q8_0", 96), ("q4_k", 512), ("f16", 320)])
def test_matrices_of_heads_do_not_depend_on_the_batch(name: str, n_in: int, ops: EmulatedFamilies) -> None:
    """One token, several, and many, of which a thread has a whole row."""
    many = mla_cases.head_linear_case(name, 21, 2, 32, n_in)
    inputs = many.inputs()
    together = many.run(ops, inputs)["out"]  # type: ignore[arg-type]
    for n in (1, 9):
        some = mla_cases.head_linear_case(name, n, 2, 32, n_in).run(ops, inputs | {"x": inputs["x"][:n]})  # type: ignore[arg-type]
        assert np.array_equal(some["out"], together[:n])


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_recurrent(case: Case, ops: EmulatedFamilies) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), max(5e-5, 3 * case.tolerance))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [c for c in pointwise_cases.CASES if c.kind == "edge"], ids=lambda case: case.name)
def test_pointwise(case: Case, ops: EmulatedFamilies) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), max(case.tolerance, 2e-5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [sample_case(3, 100), sample_case(4, 1000), sample_case(7, 5000), sample_case(3, 50, greedy=True)],
    ids=lambda case: case.name,
)
def test_sampling(case: Case, ops: EmulatedFamilies) -> None:
    inputs = case.inputs()
    got, want = case.run(ops, inputs), case.expected(inputs)  # type: ignore[arg-type]
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("scale", [0.4, 3.0, 30.0])
def test_filters_with_equal_logits(scale: float, ops: EmulatedFamilies) -> None:
    """All candidates, some, or fewer than top_k; logits are rounded, so that borders fall among equal ones."""
    rng = np.random.default_rng(int(scale * 10))
    n_rows, n_vocab = 12, 300
    params = sampling_cases.random_params(rng, n_rows, n_vocab)
    params.repetition_penalty[:] = 1.0
    params.top_k[:6] = [1, 7, 40, 0, 200, 0]
    params.top_p[:6] = [1.0, 0.8, 1.0, 0.6, 0.95, 1.0]
    params.temperature[:] = 1.5
    logits = np.round(rng.standard_normal((n_rows, n_vocab)) * scale).astype(np.float32)
    logits += np.float32(0.25)  # sums of masses stay clear of exact ties with the drawn number
    want, got = np.zeros(n_rows, np.int32), ops.empty((n_rows,), np.int32)
    ReferenceOps(np.float64).sample(logits.astype(np.float64), params, want)
    ops.sample(ops.upload(logits), params, got)
    assert np.array_equal(ops.download(got), want)


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
def test_filters_beside_each_other(scale: float, ops: EmulatedFamilies) -> None:
    """Rows whose candidates are few, many, or all; a later filter may keep less than the first one needs to see."""
    rng = np.random.default_rng(int(scale * 100))
    filters = [(k, p, m) for k in (0, 3, 300, 1500) for p in (1.0, 0.97, 0.3) for m in (0.0, 0.02, 0.6)]
    top_k, top_p, min_p = (np.array(column) for column in zip(*filters, strict=True))
    n_rows, n_vocab = len(filters), 2300
    logits = (rng.standard_normal((n_rows, n_vocab)) * scale).astype(np.float32)
    params = sampling_cases.params_of(
        n_rows, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, uniform=rng.random(n_rows)
    )
    want, got = np.zeros(n_rows, np.int32), ops.empty((n_rows,), np.int32)
    ReferenceOps(np.float64).sample(logits.astype(np.float64), params, want)
    ops.sample(ops.upload(logits), params, got)
    assert np.array_equal(ops.download(got), want)


def test_draws_without_filters_walk_by_id(ops: EmulatedFamilies) -> None:
    """Several blocks a row: every border between them is crossed; a row with filters and a greedy one stand between.

    With equal logits the u-th of n tokens is drawn for uniform = (u + 0.5) / n.
    """
    n_vocab = 4700  # three parts, none of them whole
    wanted = np.array([0, 1, 1566, 1567, 1568, 3133, 3134, 3135, 4698, 4699], np.int32)
    params = sampling_cases.params_of(len(wanted), temperature=0.7, uniform=(wanted + 0.5) / n_vocab)
    params.temperature[3] = 0.0
    params.top_k[5] = 2000
    got = ops.empty((len(wanted),), np.int32)
    ops.sample(ops.upload(np.full((len(wanted), n_vocab), -1.25, np.float32)), params, got)
    wanted[3], wanted[5] = 0, int(2000 * 3133.5 / n_vocab)
    assert ops.download(got).tolist() == wanted.tolist()


def test_masked_and_cold_rows_draw_what_is_left(ops: EmulatedFamilies) -> None:
    logits = np.full((3, 2500), -np.inf, np.float32)
    logits[0, 2499], logits[1, 7] = -3.0, 2.0
    logits[2] = np.linspace(0.0, 5.0, 2500)
    params = sampling_cases.params_of(3, temperature=[1.0, 5.0, 1e-30], uniform=0.999)
    got = ops.empty((3,), np.int32)
    ops.sample(ops.upload(logits), params, got)
    assert ops.download(got).tolist() == [2499, 7, 2499]


def test_the_cases_cover_what_they_name() -> None:
    """A renamed case would leave a family untested."""
    assert recurrent_cases.CASES and sampling_cases.CASES and len(ATTENTION) == len({case.name for case in ATTENTION})
