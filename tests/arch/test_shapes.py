"""Built-in shapes against published byte counts, and the quantiser's type rules against its own snapshots."""

from __future__ import annotations

import pytest

from rimuru.arch.quant_mix import quantisations, tensor_formats
from rimuru.arch.shapes import shape_gguf, shape_names, shape_table
from rimuru.arch.spec import AttentionSpec, Mamba2Spec, MoeSpec, ShortConvSpec
from rimuru.arch.tensors import check_tensors, expert_tensors
from rimuru.base.errors import BadInputError
from rimuru.memory.specs import conv_shape, kv_geometries, state_bytes


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_a_complete_model(name: str) -> None:
    gguf, config = shape_gguf(name, "q4_k_m")
    check_tensors(config, gguf)
    assert [layer.index for layer in config.layers] == list(range(len(config.layers)))


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(BadInputError, match="qwen3-30b-a3b"):
        shape_gguf("gpt-5")
    with pytest.raises(BadInputError, match="q4_k_m"):
        shape_gguf("qwen3-30b-a3b", "q9")
    assert shape_table("QWEN3-30B-A3B", "bf16")[0].n_embd == 2048
    assert "mxfp4_moe" in quantisations()


# One expert matrix in bytes: gate or up rows in the plain type (facts section 6.1).
@pytest.mark.parametrize(
    ("name", "layers", "experts", "q4_k", "q8_0", "mxfp4", "f16"),
    [
        ("qwen3-30b-a3b", 48, 128, 884736, 1671168, 835584, 3145728),
        ("qwen3-next-80b-a3b", 48, 512, 589824, 1114112, 557056, 2097152),
        ("qwen3.5-35b-a3b", 40, 256, 589824, 1114112, 557056, 2097152),
        ("qwen3.5-122b-a10b", 48, 256, 1769472, 3342336, 1671168, 6291456),
        ("granite-4.0-h-small", 40, 72, 1769472, 3342336, 1671168, 6291456),
        ("qwen3.5-397b-a17b", 60, 512, 2359296, 4456448, 2228224, 8388608),
        ("qwen3-235b-a22b", 94, 128, 3538944, 6684672, 3342336, 12582912),
        ("granite-4.0-h-tiny", 40, 64, 442368, 835584, 417792, 1572864),
        ("olmoe-1b-7b", 16, 64, 1179648, 2228224, 1114112, 4194304),
        ("mixtral-8x7b", 32, 8, 33030144, 62390272, 31195136, 117440512),
        ("jamba-v0.1", 16, 16, 33030144, 62390272, 31195136, 117440512),
        ("deepseek-v3", 58, 256, 8257536, 15597568, 7798784, 29360128),
        ("lfm2-8b-a1b", 22, 32, 2064384, 3899392, 1949696, 7340032),
        ("qwen1.5-moe-a2.7b", 24, 60, 1622016, 3063808, 1531904, 5767168),
        ("deepseek-v2-lite", 26, 64, 1622016, 3063808, 1531904, 5767168),
        ("glm-4.5-air", 45, 128, 3244032, 6127616, 3063808, 11534336),
        ("gpt-oss-20b", 24, 32, None, 8812800, 4406400, 16588800),
        ("gpt-oss-120b", 36, 128, None, 8812800, 4406400, 16588800),
        ("nemotron-3-nano-30b-a3b", 23, 128, None, 5300736, 2650368, 9977856),
    ],
)
def test_bytes_of_an_expert_matrix(
    name: str, layers: int, experts: int, q4_k: int | None, q8_0: int, mxfp4: int, f16: int
) -> None:
    for quant, expected in (("q4_k", q4_k), ("q8_0", q8_0), ("mxfp4", mxfp4), ("f16", f16)):
        config, table = shape_table(name, quant)
        parts = expert_tensors(config)
        assert len(parts) == layers
        up = next(part for part in next(iter(parts.values())) if part.projection == "up")
        info = table[up.tensor]
        assert info.shape[2] == experts
        if expected is not None:
            assert info.n_bytes // experts == expected
        else:
            assert info.format.name == "q5_0"


@pytest.mark.parametrize(
    ("name", "n_layers", "ssm", "conv", "total_mib"),
    [
        ("qwen3.5-35b-a3b", 30, 2097152, 98304, 62.8),
        ("qwen3-next-80b-a3b", 36, 2097152, 98304, 75.4),
        ("qwen3.5-122b-a10b", 36, 4194304, 147456, 149.1),
        ("qwen3.5-397b-a17b", 45, 4194304, 147456, 186.3),
        ("qwen3.5-27b", 48, 3145728, 122880, 149.6),
        ("granite-4.0-h-tiny", 36, 1572864, 39936, 55.4),
        ("granite-4.0-h-small", 36, 4194304, 101376, 147.5),
        ("nemotron-3-nano-30b-a3b", 23, 2097152, 73728, 47.6),
        ("jamba-v0.1", 28, 524288, 98304, 16.6),
        ("lfm2-8b-a1b", 18, 0, 16384, 0.28),
    ],
)
def test_bytes_of_recurrent_states(name: str, n_layers: int, ssm: int, conv: int, total_mib: float) -> None:
    config, _ = shape_table(name, "q8_0")
    recurrent = [layer.mixer for layer in config.layers if conv_shape(layer.mixer) is not None]
    assert len(recurrent) == n_layers
    for mixer in recurrent:
        assert state_bytes(mixer) == ssm
        shape = conv_shape(mixer)
        assert shape is not None and shape[0] * shape[1] == conv
    assert n_layers * (ssm + conv) / 2**20 == pytest.approx(total_mib, rel=0.02)


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("qwen3-30b-a3b", 98304), ("qwen3.5-35b-a3b", 20480), ("qwen3-next-80b-a3b", 24576),
        ("qwen3.5-122b-a10b", 24576), ("qwen3.5-27b", 65536), ("gpt-oss-120b", 2 * 36864), ("deepseek-v3", 70272),
        ("deepseek-v2-lite", 31104), ("nemotron-3-nano-30b-a3b", 6144), ("granite-4.0-h-tiny", 8192),
    ],
)  # fmt: skip
def test_kv_bytes_of_a_token_in_f16(name: str, n_bytes: int) -> None:
    config, _ = shape_table(name, "q8_0")
    geometries = [g for layer in config.layers for g in kv_geometries(layer.mixer)]
    assert 2 * sum(g.token_elements for g in geometries) == n_bytes


def test_layer_kinds_of_hybrids() -> None:
    def count(name: str, kind: type) -> int:
        config, _ = shape_table(name, "q8_0")
        return sum(isinstance(part, kind) for layer in config.layers for part in (layer.mixer, layer.ffn))

    nano = "nemotron-3-nano-30b-a3b"
    assert (count(nano, Mamba2Spec), count(nano, MoeSpec), count(nano, AttentionSpec)) == (23, 23, 6)
    assert (count("lfm2-8b-a1b", ShortConvSpec), count("lfm2-8b-a1b", AttentionSpec)) == (18, 6)
    assert count("jamba-v0.1", MoeSpec) == 16 and count("jamba-v0.1", AttentionSpec) == 4
    config, _ = shape_table("gpt-oss-20b", "q8_0")
    windows = [layer.mixer.window for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]
    assert windows == [128, None] * 12
    config, _ = shape_table("gemma3-1b", "q8_0")
    full = [layer.index for layer in config.layers if getattr(layer.mixer, "window", 0) is None]
    assert full == [5, 11, 17, 23]


def formats_of(name: str, part: str, quant: str = "q4_k_m") -> dict[str, int]:
    _, table = shape_table(name, quant)
    found: dict[str, int] = {}
    for info in table.values():
        if info.name.endswith(f".{part}.weight"):
            found[info.format.name] = found.get(info.format.name, 0) + 1
    return found


def test_type_mix_equals_the_quantisers_snapshots() -> None:
    """Facts section 7.2, the examples of Q4_K_M."""
    assert formats_of("qwen3.5-397b-a17b", "ffn_down_exps") == {"q6_k": 30, "q4_k": 30}
    assert formats_of("qwen3.5-397b-a17b", "attn_qkv")["q6_k"] == 23
    assert formats_of("gpt-oss-120b", "ffn_down_exps") == {"q8_0": 18, "q5_0": 18}
    assert formats_of("gpt-oss-120b", "ffn_gate_exps") == {"q5_0": 36}
    assert formats_of("glm-4.5-air", "ffn_down_exps") == {"q5_0": 24, "q8_0": 21}
    assert formats_of("deepseek-v3", "ffn_down_exps") == {"q6_k": 27, "q4_k": 31}
    assert formats_of("deepseek-v3", "attn_k_b") == {"q5_0": 61}
    assert formats_of("mixtral-8x7b", "attn_v") == {"q8_0": 32}
    assert formats_of("mixtral-8x7b", "attn_output") == {"q5_k": 32}
    assert formats_of("gpt-oss-20b", "ffn_up_exps", "mxfp4_moe") == {"mxfp4": 24}
    assert formats_of("gpt-oss-20b", "attn_q", "mxfp4_moe") == {"q8_0": 24}


def test_small_tensors_stay_float() -> None:
    config, table = shape_table("qwen3.5-35b-a3b", "q4_k_m")
    for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight", "blk.0.ssm_a"):
        assert table[name].format.name == "f32"
    assert table["output.weight"].format.name == "q6_k"
    tied, _ = shape_table("gemma3-1b", "q4_k_m")
    assert tensor_formats(tied, {"token_embd.weight": (1152, 10)}, "q4_k_m")["token_embd.weight"].name == "q8_0"
    assert config.n_vocab == 248320
