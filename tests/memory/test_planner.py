"""The layout planner: its rule on every published shape, the properties of any layout, and small models."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.arch.shape_data import ModelShape
from rimuru.arch.shapes import describe, shape_gguf, shape_names, shape_table
from rimuru.base.errors import FileFormatError
from rimuru.base.units import GIB, KIB, MIB, ceil_div, human_bytes
from rimuru.memory.planner import HUGE_LIMIT_BYTES, MIN_HUGE_PAGES, notes, plan_layout, waste
from rimuru.memory.specs import KvGroupLayout, PoolLayout

QUANTS = ("q4_k_m", "q8_0", "bf16")
MAX_WASTE = 0.05


def check_layout(layout: PoolLayout) -> None:
    """What every layout must be, whatever the model."""
    assert layout.huge_bytes > 0
    for kind in ("expert", "ssm"):
        size = layout.page_bytes(kind)  # type: ignore[arg-type]
        assert size == 0 or layout.huge_bytes % size == 0
    if layout.expert is not None:
        assert layout.expert.page_bytes % (4 * KIB) == 0
        for layer in layout.expert.layers:
            first = 0
            for part in layer.projections:
                assert part.first_page == first and part.rows_per_page >= 1
                assert part.rows_per_page * part.row_bytes <= layout.expert.page_bytes
                assert part.n_pages == ceil_div(part.n_rows, part.rows_per_page)
                first += part.n_pages
            assert layer.n_pages == first
    if layout.ssm is not None:
        assert layout.ssm.page_bytes >= layout.ssm.state_bytes
    if layout.kv is not None:
        parent = layout.slab_bytes or layout.page_bytes(layout.kv.parent)
        assert parent and parent % layout.kv.page_bytes == 0
        for group in layout.kv.groups:
            assert group.layers and group.useful_bytes <= layout.kv.page_bytes
            assert group.layer_bytes % 4 == 0
    if layout.conv is not None:
        parent = layout.slab_bytes or layout.page_bytes(layout.conv.parent)
        assert parent and parent % layout.conv.page_bytes == 0
        assert layout.conv.page_bytes >= layout.conv.row_bytes
        assert parent // layout.conv.page_bytes >= layout.conv.n_rows


def kv_layers(layout: PoolLayout) -> list[int]:
    groups: tuple[KvGroupLayout, ...] = layout.kv.groups if layout.kv else ()
    return sorted(index for group in groups for index in group.layers)


def test_table_of_all_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Waste under 5% of every kind, for every published shape, quantisation and KV type; prints the table."""
    lines = [
        f"{'model':24}{'quant':7} {'kv':4}{'expert':>10}{'ssm':>10}{'kv':>10}{'conv':>10}{'huge':>10}"
        f"{'pages/expert':>13}  {'tokens':>7}{'groups':>7}{'8 GB':>7}{'24 GB':>7}  waste by kind"
    ]
    for name in shape_names():
        for quant in QUANTS:
            config, table = shape_table(name, quant)
            for element_bytes in (2, 4):
                layout = plan_layout(config, table, element_bytes)
                check_layout(layout)
                wasted = waste(layout)
                by_kind = wasted["by_kind"]
                assert isinstance(by_kind, dict)
                sizes = "".join(
                    f"{human_bytes(layout.page_bytes(kind)) if layout.page_bytes(kind) else '-':>10}"
                    for kind in ("expert", "ssm", "kv", "conv")
                )
                per_expert = layout.expert.n_pages / layout.expert.n_experts if layout.expert else 0
                assert layout.kv is not None
                lines.append(
                    f"{name:24}{quant:7} f{8 * element_bytes:<3}{sizes}{human_bytes(layout.huge_bytes):>10}"
                    f"{per_expert:13.2f}  {layout.kv.groups[0].page_tokens:7}{len(layout.kv.groups):7}"
                    f"{int(8e9) // layout.huge_bytes:7}{int(24e9) // layout.huge_bytes:7}  "
                    + " ".join(f"{kind} {fraction:.1%}" for kind, fraction in by_kind.items())
                )
                for kind, fraction in by_kind.items():
                    assert 0 <= fraction < MAX_WASTE, (name, quant, element_bytes, kind)
                assert wasted["fraction"] == max(by_kind.values())
                assert layout.huge_bytes <= HUGE_LIMIT_BYTES
                assert kv_layers(layout) == [i for i in range(len(config.layers)) if _has_kv(config, i)]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def _has_kv(config: object, index: int) -> bool:
    return type(config.layers[index].mixer).__name__ in ("AttentionSpec", "MlaSpec")  # type: ignore[attr-defined]


def test_examples_of_the_design() -> None:
    layout = plan_layout(*shape_table("qwen3-30b-a3b", "q4_k_m"), 2)
    assert layout.expert is not None and layout.expert.page_bytes == 432 * KIB == layout.huge_bytes
    pages = {part.format.name: part.n_pages for layer in layout.expert.layers for part in layer.projections}
    assert pages == {"q4_k": 2, "q6_k": 3}
    layout = plan_layout(*shape_table("qwen3.5-35b-a3b", "q4_k_m"), 2)
    assert layout.page_bytes("expert") == 288 * KIB
    assert layout.page_bytes("ssm") == 2 * MIB
    assert layout.huge_bytes == 18 * MIB


@pytest.mark.parametrize("name", shape_names())
def test_expert_pages_depend_on_the_model_only(name: str) -> None:
    """One blob serves every KV type and every budget."""
    config, table = shape_table(name, "q4_k_m")
    first, second = plan_layout(config, table, 2), plan_layout(config, table, 4)
    assert first.expert == second.expert and first.ssm == second.ssm and first.conv == second.conv
    if first.expert is not None:
        assert first.huge_bytes == second.huge_bytes


def test_planning_is_quick() -> None:
    tables = [shape_table(name, quant) for name in ("qwen3.5-397b-a17b", "gpt-oss-120b") for quant in QUANTS]
    best = []
    for config, table in tables:
        runs = []
        for _ in range(3):
            start = time.perf_counter()
            plan_layout(config, table, 2)
            runs.append(time.perf_counter() - start)
        best.append(min(runs))
    assert max(best) < 0.2


def test_bfloat_and_file_argument() -> None:
    gguf, config = shape_gguf("qwen3-30b-a3b", "q8_0")
    layout = plan_layout(config, gguf, 2, bfloat=True)
    assert layout.kv is not None and {group.element for group in layout.kv.groups} == {"bf16"}
    plain = plan_layout(config, dict(gguf.tensors), 2)
    assert plain.expert == layout.expert


def test_notes_say_what_a_small_pool_means() -> None:
    layout = plan_layout(*shape_table("qwen3.5-35b-a3b", "q4_k_m"), 2)
    assert notes(layout, 4 * GIB) == []
    (note,) = notes(layout, 200 * MIB)
    assert "11 huge pages" in note and str(MIN_HUGE_PAGES) in note
    padded = replace(layout, ssm=replace(layout.ssm, state_bytes=MIB))  # type: ignore[type-var]
    assert any("ssm" in note for note in notes(padded, 4 * GIB))


def test_waste_is_what_it_says() -> None:
    layout = plan_layout(*shape_table("qwen3-30b-a3b", "q4_k_m"), 4)
    assert layout.expert is not None
    half, full = (6 * 432, 2 * 864 + 864), (7 * 432, 2 * 864 + 1260)
    expected = 1 - (half[1] + full[1]) / (half[0] + full[0])
    by_kind = waste(layout)["by_kind"]
    assert isinstance(by_kind, dict) and by_kind["expert"] == pytest.approx(expected)


def test_missing_expert_tensors_are_refused() -> None:
    config, table = shape_table("qwen3-30b-a3b", "q8_0")
    name = "blk.7.ffn_up_exps.weight"
    with pytest.raises(FileFormatError, match=f"{name} is missing"):
        plan_layout(config, {key: info for key, info in table.items() if key != name}, 2)
    with pytest.raises(FileFormatError, match="has shape"):
        plan_layout(config, table | {name: replace(table[name], shape=(2048, 768, 127))}, 2)


def test_latent_attention_keeps_one_vector() -> None:
    layout = plan_layout(*shape_table("deepseek-v3", "q4_k_m"), 2)
    assert layout.kv is not None
    (group,) = layout.kv.groups
    assert (group.n_head_kv, group.key_dim, group.value_dim) == (1, 576, 0)
    assert group.useful_bytes == 70272 * group.page_tokens


def test_windows_have_groups_of_their_own() -> None:
    layout = plan_layout(*shape_table("gpt-oss-20b", "mxfp4_moe"), 2)
    assert layout.kv is not None
    assert {group.window for group in layout.kv.groups} == {128, None}
    for group in layout.kv.groups:
        assert all((index % 2 == 0) == (group.window == 128) for index in group.layers)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 9),
    embd=st.integers(1, 40).map(lambda n: 32 * n),
    width=st.integers(1, 60).map(lambda n: 32 * n),
    experts=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 8)]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    quant=st.sampled_from(["q4_k_m", "q8_0", "f16", "f32", "mxfp4"]),
    element_bytes=st.sampled_from([2, 4]),
)
def test_any_mixture_gets_a_sound_layout(
    layers: int,
    embd: int,
    width: int,
    experts: int,
    heads: tuple[int, int],
    head_dim: int,
    quant: str,
    element_bytes: int,
) -> None:
    keys = {
        "block_count": layers, "context_length": 512, "embedding_length": embd, "feed_forward_length": 64,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": experts,
        "expert_used_count": 1, "expert_feed_forward_length": width,
    }  # fmt: skip
    gguf, config = describe(ModelShape("qwen3moe", 64, keys), quant, "any")
    layout = plan_layout(config, gguf, element_bytes)
    check_layout(layout)
    assert kv_layers(layout) == list(range(layers))
    assert layout.kv is not None and min(group.page_tokens for group in layout.kv.groups) >= 8


@settings(max_examples=60, deadline=None)
@given(
    value_heads=st.sampled_from([2, 4, 6, 16]),
    state=st.sampled_from([16, 32, 64, 128]),
    width=st.integers(1, 24).map(lambda n: 32 * n),
    experts=st.sampled_from([0, 4, 8]),
    quant=st.sampled_from(["q4_k_m", "q8_0", "bf16"]),
)
def test_any_hybrid_gets_a_sound_layout(value_heads: int, state: int, width: int, experts: int, quant: str) -> None:
    keys = {
        "block_count": 4, "context_length": 512, "embedding_length": 256, "feed_forward_length": 192,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 32,
        "rope.dimension_sections": [6, 5, 5, 0], "ssm.conv_kernel": 4, "ssm.state_size": state,
        "ssm.group_count": 2, "ssm.time_step_rank": value_heads, "ssm.inner_size": value_heads * state,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": width}
        keys |= {"expert_shared_feed_forward_length": 64}
    gguf, config = describe(ModelShape("qwen35moe" if experts else "qwen35", 64, keys), quant, "any")
    layout = plan_layout(config, gguf, 4)
    check_layout(layout)
    assert layout.ssm is not None and layout.conv is not None
    assert layout.ssm.layers == layout.conv.layers == (0, 1, 2)
