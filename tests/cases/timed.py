"""Cases that are only timed: shapes of real models in each family of kernels, some of them too large to be tested."""

from __future__ import annotations

from cases import attention, fused, matmul, mla, moe, pointwise, recurrent, residency, sampling, waiting
from cases.attention import AttentionShape, QkvShape, attention_case, qkv_case
from cases.common import Case
from cases.matmul import linear_case
from cases.recurrent import Tokens
from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec, MoeSpec

QWEN35_MOE = MoeSpec(256, 8, 512, renormalise=True)
GPT_OSS_20B = MoeSpec(32, 4, 2880, "softmax_selected", activation="swiglu_oai")
V2_LITE = MoeSpec(64, 6, 1408)
_Q4_K_M = {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}
_STEP, _PIECE = Tokens([1] * 32, [10] * 32), Tokens([512], [512])


def _experts(label: str, formats: dict[str, str], spec: MoeSpec, n_in: int, page_kib: int, *tokens: int) -> list[Case]:
    return [
        moe.experts_case(f"{label} T={n}", formats, spec, n_in, n, page_bytes=page_kib * 1024, kind="model")
        for n in tokens
    ]


def _latent(n_seqs: int, context: int) -> Case:
    shape = AttentionShape([1] * n_seqs, [context] * n_seqs, 16, 1, 576, 0, 64, "f16", value_width=512)
    return attention_case(f"latent decode {n_seqs} x {context} f16", shape, "model")


MATMUL = [
    *[
        linear_case(f"qwen3-30b q k v T={n}", ["q4_k", "q4_k", "q6_k"], [4096, 512, 512], 2048, n, kind="model")
        for n in (1, 8, 32, 96, 512, 4096)
    ],
    *[linear_case(f"qwen3-30b o T={n}", ["q4_k"], [2048], 4096, n, kind="model") for n in (1, 32, 512)],
    *[linear_case(f"qwen3-30b head T={n}", ["q6_k"], [151936], 2048, n, kind="model") for n in (1, 8, 32)],
    *[linear_case(f"qwen3-30b router T={n}", ["f32"], [128], 2048, n, kind="model") for n in (1, 32, 512, 4096)],
    linear_case("q8_0 4096x2880 T=1", ["q8_0"], [4096], 2880, 1, kind="model"),
]

EXPERTS = [
    *_experts("qwen3-30b", _Q4_K_M, moe.QWEN3_30B, 2048, 432, 1, 8, 32, 96, 512, 2048),
    *_experts("gpt-oss-20b", dict.fromkeys(_Q4_K_M, "mxfp4"), GPT_OSS_20B, 2880, 765, 1, 32, 512),
    *_experts("v2-lite", {"gate": "q4_k", "up": "q4_k", "down": "q8_0"}, V2_LITE, 2048, 396, 1, 32, 512),
    *[moe.route_case(f"qwen3-30b T={n}", moe.QWEN3_30B, n) for n in (1, 32, 512)],
    moe.replay_case(32, 48, 8),
    *[moe.summed_case(f"qwen3-30b T={n}", _Q4_K_M, moe.QWEN3_30B, 2048, n, 432 * 1024, "model") for n in (1, 4)],
    *[moe.combine_case(n, 8, 2048, True, "model") for n in (1, 32, 512)],
]

ATTENTION = [
    *[
        attention_case(name, shape, "model")
        for name, shape in attention.BENCH_SHAPES.items()
        if shape.element == "f16" or name.startswith("decode")  # f32: --kv-type f32
    ],
    *[
        attention_case(f"decode {n} x 1024 of {dim} f16", AttentionShape(
            [1] * n, [1024] * n, *heads, dim, dim, 64, "f16"), "model")
        for n, heads, dim in ((32, (32, 4), 128), (8, (16, 2), 256))
    ],
    attention_case("prefill 2048 of 256 f16", AttentionShape([2048], [2048], 16, 2, 256, 256, 64, "f16"), "model"),
    attention_case("window 128, sinks, decode 8 x 4096 f16", AttentionShape(
        [1] * 8, [4096] * 8, 64, 8, 64, 64, 64, "f16", 128, True), "model"),
    _latent(1, 4096),
    _latent(8, 1024),
    attention_case("latent prefill 2048 f16", AttentionShape(
        [2048], [2048], 16, 1, 576, 0, 64, "f16", value_width=512), "model"),
    *[
        qkv_case(f"qwen3-30b {n} tokens", QkvShape(
            [n], [n], 32, 4, 128, 128, 72, "f16", "head", n_rot=128), "model")
        for n in (1, 512)
    ],
]  # fmt: skip

RECURRENT = [
    *[
        recurrent.delta_case(f"16/32 heads of 128, {label}", tokens, DeltaNetSpec(16, 32, 128, 4, "tiled"), "model")
        for label, tokens in (("32 steps", _STEP), ("512 tokens", _PIECE), ("4096 tokens", Tokens([4096], [4096])))
    ],
    *[
        recurrent.mamba2_case(f"128 heads of 64, {label}", tokens, Mamba2Spec(8192, 128, 128, 1, 4), "model")
        for label, tokens in (("32 steps", _STEP), ("512 tokens", _PIECE))
    ],
    *[
        recurrent.mamba1_case(f"8192 channels, {label}", tokens, Mamba1Spec(8192, 16, 256, 4), "model")
        for label, tokens in (("32 steps", _STEP), ("512 tokens", _PIECE))
    ],
    *[
        recurrent.conv_case(f"8192 channels, {label}", tokens, 8192, 4, False, True, "model")
        for label, tokens in (("32 steps", _STEP), ("512 tokens", _PIECE))
    ],
]

OTHERS = [
    *[pointwise.embed_case("q4_k", n, 2048, 151936, "model") for n in (1, 512)],
    *[sampling.sample_case(n, 151936, greedy, "model") for n in (1, 32) for greedy in (False, True)],
    *[
        mla.head_linear_case("q8_0", n, 16, n_out, n_in, rest, "model")
        for n in (1, 64, 512)
        for n_out, n_in, rest in ((512, 128, 64), (128, 512, 0))
    ],
]


def cases() -> list[Case]:
    """The ones above and those cases of the tests that have model shapes."""
    tested = [*pointwise.CASES, *matmul.CASES, *attention.QKV_CASES, *recurrent.CASES, *sampling.CASES, *fused.CASES]
    tested += [*waiting.CASES, *residency.CASES]
    found = MATMUL + EXPERTS + ATTENTION + RECURRENT + OTHERS
    names = {case.name for case in found}
    return found + [case for case in tested if case.kind == "model" and case.name not in names]
