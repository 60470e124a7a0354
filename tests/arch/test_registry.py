"""Reading descriptions from metadata: every architecture, every check, and the list of tensors."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru import LLM
from rimuru.arch.quant_mix import tensor_formats
from rimuru.arch.registry import architectures, can_run, read_config, require_runnable, runnable_architectures
from rimuru.arch.shape_data import ModelShape
from rimuru.arch.shapes import ShapeGguf, describe, key_values, shape_gguf, tensor_table
from rimuru.arch.spec import AttentionSpec, ModelConfig, MoeSpec
from rimuru.arch.tensors import check_tensors, expert_tensors, model_tensors
from rimuru.base.errors import FileFormatError, UnsupportedModelError
from rimuru.cli import main
from rimuru.formats.gguf import TensorInfo
from rimuru.formats.quants import BY_NAME
from rimuru.formats.writer import write_gguf
from tools import make_random_gguf

FACTS_ARCHITECTURES = {
    "qwen2moe", "qwen3moe", "qwen3next", "qwen35moe", "qwen35", "granitehybrid", "nemotron_h", "nemotron_h_moe",
    "jamba", "llama", "olmoe", "deepseek2", "gpt-oss", "glm4moe", "lfm2", "lfm2moe", "deepseek4", "qwen2", "qwen3",
    "gemma3", "granitemoe", "bailingmoe2", "minimax-m2", "hunyuan-moe", "dots1", "ernie4_5-moe", "phi3",
    "granite",  # granitemoe without experts
}  # fmt: skip
QWEN3MOE: dict[str, Any] = {
    "block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
    "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
}  # fmt: skip
DEEPSEEK4: dict[str, Any] = {
    "block_count": 4, "context_length": 65536, "embedding_length": 256, "attention.head_count": 8,
    "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 32, "attention.q_lora_rank": 64,
    "attention.sliding_window": 128, "expert_count": 16, "expert_used_count": 2, "expert_feed_forward_length": 128,
    "expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 4,
    "swiglu_clamp_exp": 10.0, "attention.indexer.head_count": 4, "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 16, "attention.output_group_count": 2, "attention.output_lora_rank": 32,
    "attention.compress_ratios": [0, 4, 128, 4], "attention.compress_rope_freq_base": 160000.0,
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    "hash_layer_count": 2,
}  # fmt: skip


def qwen3moe(changes: dict[str, Any] | None = None) -> tuple[ShapeGguf, ModelConfig]:
    keys = {key: value for key, value in (QWEN3MOE | (changes or {})).items() if value is not None}
    return describe(ModelShape("qwen3moe", 100, keys), "f16", "test.gguf")


def with_tensors(gguf: ShapeGguf, changes: dict[str, tuple[int, ...] | None]) -> ShapeGguf:
    """A file with tensors added, of another shape, or (None) missing."""
    table = dict(gguf.tensors)
    for name, shape in changes.items():
        table.pop(name, None)
        if shape is not None:
            table |= tensor_table({name: shape}, {name: BY_NAME["f32"]})
    return replace(gguf, tensors=table)


def test_every_architecture_of_the_facts_is_known() -> None:
    assert set(architectures()) == FACTS_ARCHITECTURES
    foundation = {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "olmoe"}
    assert foundation <= set(runnable_architectures("cpu"))


def test_unknown_architecture_is_refused_with_the_list() -> None:
    gguf, _ = qwen3moe()
    with pytest.raises(UnsupportedModelError, match=r"'grok'.*qwen3moe"):
        read_config(replace(gguf, architecture="grok"))


def test_what_cannot_run_is_refused_with_what_can() -> None:
    planned_only = next(name for name in ("deepseek4", "gemma3") if not can_run(name))
    config = replace(qwen3moe()[1], architecture=planned_only)
    with pytest.raises(UnsupportedModelError, match=r"runnable: .*qwen3moe"):
        require_runnable(config)
    require_runnable(qwen3moe()[1], "cpu")


def test_qwen3moe_fields() -> None:
    _, config = qwen3moe()
    layer = config.layers[2]
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MoeSpec)
    assert (layer.mixer.n_head, layer.mixer.n_head_kv, layer.mixer.key_dim, layer.mixer.qk_norm) == (4, 2, 32, "head")
    assert layer.mixer.scale == pytest.approx(32**-0.5)
    assert layer.mixer.rope is not None and layer.mixer.rope.n_rot == 32 and layer.mixer.rope.pairing == "half"
    assert layer.ffn.renormalise and layer.ffn.top_k == 2 and layer.ffn.width == 32
    assert config.n_vocab == 100 and not config.tied_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 513}, "block_count is 513"),
        ({"nextn_predict_layers": 3}, "prediction blocks"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"embedding_length": 32.0}, "embedding_length must be of type int"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"rope.freq_base": float("inf")}, "freq_base"),
        ({"rope.freq_base": -1.0}, "freq_base"),
        ({"rope.dimension_count": 31}, "rotated"),
        ({"rope.dimension_count": 64}, "rotated"),
        ({"rope.scaling.factor": -2.0}, "factor"),
        ({"attention.head_count_kv": 3}, "no multiple of 3 KV heads"),
        ({"attention.head_count_kv": 0}, "must be positive"),
        ({"attention.head_count_kv": [2]}, "1 entries"),
        ({"attention.head_count_kv": [2, -2, 2]}, "negative"),
        ({"expert_used_count": 9}, "must be 1 to the 8 experts"),
        ({"expert_used_count": 0}, "must be 1 to the 8 experts"),
        ({"expert_count": 1025}, "must be 1 to 1024"),
        ({"expert_group_count": 3, "expert_group_used_count": 1}, "equal groups"),
        ({"expert_group_count": 4, "expert_group_used_count": 4}, "must be 1 to 3"),
        ({"expert_feed_forward_length": 0}, "width 0"),
    ],
)
def test_senseless_keys_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as error:
        qwen3moe(changes)
    assert "\n" not in str(error.value) and "test.gguf" in str(error.value)


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        qwen3moe({"rope.scaling.type": "dynamic"})


def test_scalar_and_array_keys_of_any_integer_type_mean_the_same() -> None:
    """Known fault L09."""
    gguf, config = qwen3moe()
    metadata = {"general.architecture": "qwen3moe", "general.name": "test.gguf"}
    metadata |= {f"qwen3moe.{key}": value for key, value in QWEN3MOE.items()}
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_used_count"):
        metadata[f"qwen3moe.{key}"] = [QWEN3MOE[key]] * 3
    assert read_config(replace(gguf, kv=key_values(Path("test.gguf"), metadata))) == config


def test_vocabulary_and_embedding_must_agree() -> None:
    gguf, _ = qwen3moe()
    with pytest.raises(FileFormatError, match=r"token_embd\.weight"):
        read_config(with_tensors(gguf, {"token_embd.weight": (32, 100)}))
    with pytest.raises(FileFormatError, match=r"token_embd\.weight is missing"):
        read_config(with_tensors(gguf, {"token_embd.weight": None}))


# ---------------------------------------------------------------- tensors
def test_a_described_file_has_exactly_its_tensors() -> None:
    gguf, config = qwen3moe()
    check_tensors(config, gguf)
    assert set(gguf.tensors) == set(model_tensors(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "blk.1.attn_k.weight of shape"),
        ({"blk.1.ffn_up_exps.weight": (64, 32, 7)}, r"has shape \[64, 32, 7\], expected \[64, 32, 8\]"),
        ({"blk.3.attn_q.weight": (64, 128)}, "blk.3.attn_q.weight has no place"),
        ({"blk.0.ffn_gate.weight": (64, 96)}, "blk.0.ffn_gate.weight has no place"),
        ({"blk.0.attn_q.scale": (1,)}, "blk.0.attn_q.scale has no place"),
        ({"output_norm.weight": None}, "output_norm.weight"),
    ],
)
def test_wrong_tensors_are_refused(changes: dict[str, tuple[int, ...] | None], message: str) -> None:
    gguf, _ = qwen3moe()
    changed = with_tensors(gguf, changes)
    with pytest.raises(FileFormatError, match=message):
        check_tensors(read_config(changed), changed)


def test_trailing_dimensions_of_one_do_not_matter() -> None:
    gguf, config = qwen3moe()
    check_tensors(config, with_tensors(gguf, {"output_norm.weight": (64, 1)}))


def test_old_files_with_a_tensor_per_expert_are_refused_by_name() -> None:
    """Known fault L15."""
    gguf, config = qwen3moe()
    changes: dict[str, tuple[int, ...] | None] = {"blk.0.ffn_gate_exps.weight": None}
    changes |= {f"blk.0.ffn_gate.{e}.weight": (64, 32) for e in range(8)}
    with pytest.raises(UnsupportedModelError, match=r"per-expert tensor layout \(pre-2024\) not supported"):
        check_tensors(config, with_tensors(gguf, changes))


def test_prediction_blocks_are_left_alone() -> None:
    gguf, config = qwen3moe({"block_count": 4, "nextn_predict_layers": 1})
    assert len(config.layers) == 3 and config.n_mtp_blocks == 1
    check_tensors(config, with_tensors(gguf, {"blk.3.nextn.eh_proj.weight": (128, 64), "blk.3.anything": (1,)}))
    with pytest.raises(FileFormatError, match=r"blk\.4"):
        check_tensors(config, with_tensors(gguf, {"blk.4.nextn.eh_proj.weight": (128, 64)}))


def test_fused_tensors_are_found() -> None:
    gguf, _ = qwen3moe()
    changes: dict[str, tuple[int, ...] | None] = {f"blk.0.attn_{part}.weight": None for part in "qkv"}
    changes["blk.0.attn_qkv.weight"] = (64, 128 + 64 + 64)
    changes |= {"blk.2.ffn_gate_exps.weight": None, "blk.2.ffn_up_exps.weight": None}
    changes["blk.2.ffn_gate_up_exps.weight"] = (64, 64, 8)
    fused = with_tensors(gguf, changes)
    config = read_config(fused)
    check_tensors(config, fused)
    gate, up, down = expert_tensors(config)[2]
    assert (gate.projection, up.projection, down.projection) == ("gate", "up", "down")
    assert gate.tensor == up.tensor and (gate.tensor_row, up.tensor_row) == (0, 32)
    assert gate.tensor_rows == up.tensor_rows == 64 and gate.n_rows == up.n_rows == 32
    assert (down.n_rows, down.n_in, down.tensor_rows) == (64, 32, 64)
    assert [part.tensor_row for part in expert_tensors(config)[0]] == [0, 0, 0]


def test_a_tied_head_where_it_is_allowed() -> None:
    gguf, _ = qwen3moe()
    untied = with_tensors(gguf, {"output.weight": None})
    config = read_config(untied)
    assert config.tied_head
    check_tensors(config, untied)
    gguf, config = shape_gguf("olmoe-1b-7b", "q8_0")
    with pytest.raises(FileFormatError, match=r"output\.weight"):
        untied = with_tensors(gguf, {"output.weight": None})
        check_tensors(read_config(untied), untied)


def test_deepseek4_is_described() -> None:
    gguf, config = describe(ModelShape("deepseek4", 300, DEEPSEEK4), "q8_0", "v4")
    check_tensors(config, gguf)
    shapes = model_tensors(config)
    assert shapes["blk.1.indexer_compressor_kv.weight"] == (256, 64)
    assert shapes["blk.2.attn_compressor_ape.weight"] == (64, 128)
    assert shapes["blk.0.hc_attn_fn.weight"] == (1024, 24)
    assert gguf.tensors["blk.1.ffn_gate_tid2eid.weight"].format.name == "i32"
    assert "blk.2.exp_probs_b.bias" in shapes and "blk.1.exp_probs_b.bias" not in shapes


@pytest.mark.parametrize("command", ["run", "bench", "perplexity", "convert"])
def test_deepseek4_files_are_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelShape("deepseek4", 300, DEEPSEEK4)
    gguf, _ = describe(shape, "q8_0", "v4")
    kinds = {bool: "bool", int: "u32", float: "f32"}
    kv: list[Any] = [("general.architecture", "str", "deepseek4"), ("tokenizer.ggml.model", "str", "none")]
    for key, value in shape.metadata().items():
        kv.append((key, "arr", ("i32", value)) if isinstance(value, list) else (key, kinds[type(value)], value))
    tensors = [(t.name, t.shape, t.format, np.zeros(t.n_bytes, np.uint8)) for t in gguf.tensors.values()]
    path = tmp_path / "v4.gguf"
    write_gguf(path, kv, tensors)
    text = tmp_path / "text.txt"
    text.write_text("hello")
    more = {"run": ["-p", "hi"], "perplexity": ["-f", str(text)]}.get(command, [])
    assert main([command, str(path), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rimuru: models of architecture deepseek4 can be inspected, but not run yet; runnable: ")
    assert error.count("\n") == 1
    assert main(["inspect", str(path)]) == 0


def test_yarn_scale_of_latent_attention() -> None:
    """With the log multiplier cos and sin keep their size; without it they grow as the scores do (facts 4.9)."""
    _, config = shape_gguf("deepseek-v3", "q8_0")
    mixer: Any = config.layers[0].mixer
    growth = 1 + 0.1 * np.log(40.0)
    assert mixer.rope.magnitude == pytest.approx(1.0)
    assert mixer.scale == pytest.approx(growth**2 / np.sqrt(192))
    assert (mixer.nope_dim, mixer.value_dim, mixer.kv_lora_rank) == (128, 128, 512)


def test_handed_models_are_described_and_complete(shared: Path) -> None:
    """Every model of the handed cases, from its metadata and tensor names alone."""
    spec = importlib.util.spec_from_file_location("make_models_headers", shared / "cases/logits/make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_models_headers"] = module
    spec.loader.exec_module(module)
    for name in module.MODELS:
        model = module.build(name)
        tensors = {t.name: TensorInfo(t.name, t.ne, BY_NAME[t.type], 0, 0, len(t.data)) for t in model.tensors}
        kv = key_values(Path(name), model.metadata)
        gguf = ShapeGguf(model.metadata["general.architecture"], Path(name), kv, tensors)
        config = read_config(gguf, 512)
        check_tensors(config, gguf)
        assert config.n_vocab == 160
        assert set(tensor_formats(config, model_tensors(config), "q8_0")) <= set(tensors), name


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"])
def test_a_name_of_any_length_is_shown_short(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = make_random_gguf.write_gguf

    def write_absurd(path: Path, keys: Any, *rest: Any, **more: Any) -> None:
        write(path, [(k, kind, "x" * 100_000 if k == key else value) for k, kind, value in keys], *rest, **more)

    monkeypatch.setattr(make_random_gguf, "write_gguf", write_absurd)
    path = make_random_gguf.write_random_model(tmp_path / "absurd.gguf")
    with pytest.raises(UnsupportedModelError, match="'xxxx") as caught:
        LLM(path, device="cpu")
    assert len(str(caught.value)) < 2000
