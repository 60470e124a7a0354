"""Which test covers which kind of fault of cases/known-faults.md (loading, tokenizer, chat template, experts,
quantisation, sampling, the server, memory, moving experts), and the first of them once more from the outside: whole
files through the command line. The server's, memory's and sampling's are tested over real HTTP (tests/server)."""

from __future__ import annotations

import ast
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from naive.model import naive_logits

from rimuru import LLM, SamplingParams
from rimuru.cli import main
from rimuru.formats.gguf import open_gguf
from rimuru.formats.quants import BY_NAME
from tools import make_random_gguf
from tools.make_random_gguf import write_random_model

TESTS = Path(__file__).resolve().parents[1]
COVERED: dict[str, tuple[str, ...]] = {
    "L01": ("e2e/test_script.py::test_tied_head_equals_its_copy_and_costs_less",),
    "L03": (
        "e2e/test_script.py::test_any_part_opens_the_split_set",
        "formats/test_gguf_reader.py::test_split_faults_are_named",
        "formats/test_gguf_shared.py::test_the_split_set_is_one_model_from_every_side",
    ),
    "L05": (
        "formats/test_gguf_shared.py::test_legal_oddities_hold_the_same_tensors",
        "formats/test_gguf_reader.py::test_tensors_come_back",
    ),
    "L07": (
        "formats/test_gguf_shared.py::test_bad_files_are_refused_by_name",
        "e2e/test_cli_errors.py::test_malformed_headers",
    ),
    "L09": (
        "arch/test_registry.py::test_scalar_and_array_keys_of_any_integer_type_mean_the_same",
        "faults/test_known_faults.py::test_head_counts_as_arrays",
    ),
    "L11": (
        "e2e/test_logits_cases.py::test_reference_logits",
        "e2e/test_families.py::test_quantised_models_differ_by_rounding_only",
    ),
    "L13": (
        "formats/test_gguf_reader.py::test_unusable_formats_are_all_listed",
        "faults/test_known_faults.py::test_types_that_cannot_run_are_all_named",
    ),
    "L15": ("arch/test_registry.py::test_old_files_with_a_tensor_per_expert_are_refused_by_name",),
    "T01": ("text/test_tokenizer_vectors.py::test_qwen2_ids", "text/test_tokenizer_vectors.py::test_all_vectors"),
    "T03": (
        "text/test_chat_template.py::test_control_tokens_in_content_are_plain_text",
        "text/test_chat_template.py::test_content_reads_the_same_as_alone",
        "text/test_tokenizer.py::test_control_tokens_need_trust",
    ),
    "T05": (
        "text/test_tokenizer_vectors.py::test_llama_spm_ids",
        "text/test_tokenizer.py::test_space_prefix",
        "text/test_detokenize.py::test_stream_is_decode_for_sentencepiece",
    ),
    "T07": (
        "text/test_pretokenize.py::test_a_missing_or_default_name_warns_once",
        "text/test_pretokenize.py::test_an_unknown_name_is_refused_with_the_known_ones",
        "faults/test_known_faults.py::test_an_unknown_pre_tokenizer_is_refused",
    ),
    "C01": ("text/test_chat_template.py::test_tojson_is_plain_json",),
    "C03": ("text/test_chat_template.py::test_content_null_and_tool_calls",),
    "C05": ("text/test_chat_template.py::test_bos_is_never_doubled",),
    "E01": ("ops/test_cpu_pointwise.py::test_known_router_values", "ops/test_cuda_moe.py::test_case"),
    "E03": ("ops/test_cpu_moe.py::test_repeated_experts", "ops/test_cuda_moe.py::test_case"),
    "E05": (
        "ops/test_cpu_moe.py::test_expert_counts",
        "ops/test_cpu_pointwise.py::test_high_experts_win",
        "ops/test_cuda_moe.py::test_case",
        "arch/test_registry.py::test_senseless_keys_are_refused",
        "faults/test_known_faults.py::test_numbers_of_experts",
    ),
    "E07": ("ops/test_cpu_moe.py::test_large_hidden_values_stay_finite", "ops/test_cuda_moe.py::test_case"),
    "Q01": (
        "ops/test_cpu_matmul.py::test_products_and_independence_of_the_batch",
        "ops/test_cuda_matmul.py::test_widths",
        "faults/test_known_faults.py::test_rows_that_no_k_quant_divides",
        "faults/test_known_faults.py::test_a_width_that_the_blocks_do_not_divide",
    ),
    "Q03": ("ops/test_cpu_matmul.py::test_extreme_activations", "ops/test_cuda_matmul.py::test_case"),
    "H01": ("server/test_openai_api.py::test_a_character_over_two_tokens_comes_whole",),
    "H03": ("server/test_openai_api.py::test_stop_strings_never_show",),
    "H05": (
        "server/test_leaving.py::test_leaving_while_decoding",
        "server/test_leaving.py::test_leaving_while_the_prompt_is_read",
        "server/test_leaving.py::test_leaving_the_queue",
    ),
    "H07": ("server/test_openai_api.py::test_token_limits",),
    "H09": (
        "server/test_openai_api.py::test_stream_usage_equals_the_whole_answers",
        "server/test_openai_api.py::test_prefix_hits_are_reported_and_change_nothing",
    ),
    "H11": (
        "server/test_limits.py::test_prompts_around_the_context",
        "server/test_limits.py::test_reaching_the_context_is_a_length_stop",
    ),
    "H13": (
        "server/test_structured.py::test_calls_whole_and_streamed_are_equal",
        "server/test_tool_calls.py::test_any_text_parses_alike_however_it_is_cut",
    ),
    "M01": (
        "server/test_faults_http.py::test_dirty_pages_never_show",
        "e2e/test_hybrid_prefix.py::test_poisoned_pages_never_show",
    ),
    "M03": ("server/test_faults_http.py::test_shared_beginnings_of_any_length",),
    "M05": (
        "server/test_leaving.py::test_many_clients_that_leave_at_random",
        "server/test_soak.py::test_soak",
    ),
    "M07": (
        "server/test_limits.py::test_a_small_pool_queues_and_goes_on",
        "server/test_limits.py::test_a_failing_step_fails_its_requests_only",
    ),
    "M09": (
        "server/test_faults_http.py::test_conversations_stay_apart",
        "server/test_leaving.py::test_concurrent_answers_equal_solo_answers",
    ),
    "R01": ("server/test_faults_http.py::test_experts_that_come_and_go_change_nothing",),
    "R03": (
        "server/test_leaving.py::test_many_clients_that_leave_at_random",
        "server/test_leaving.py::test_requests_from_many_threads_of_one_client",
    ),
    "S01": (
        "ops/test_cpu_sampling.py::test_filters_come_before_the_temperature",
        "server/test_faults_http.py::test_the_temperature_does_not_choose_the_candidates",
    ),
    "S03": (
        "server/test_openai_api.py::test_prefix_hits_are_reported_and_change_nothing",
        "ops/test_cpu_sampling.py::test_repetition_penalty_values",
        "faults/test_known_faults.py::test_penalties_count_cached_prompts",
    ),
    "S05": (
        "server/test_openai_api.py::test_extreme_sampling_is_safe",
        "ops/test_cpu_sampling.py::test_extreme_parameters",
        "faults/test_bad_arguments.py::test_ends_of_the_sampling_ranges",
    ),
}


@pytest.mark.parametrize("row", COVERED)
def test_the_named_tests_exist(row: str) -> None:
    for place in COVERED[row]:
        file, name = place.split("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


def test_no_row_is_forgotten(shared: Path) -> None:
    text = (shared / "cases/known-faults.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| ([A-Z]\d\d) ", text, re.MULTILINE)) == set(COVERED)


IDS = [3, 17, 99, 140, 5, 60, 61, 9, 9, 33, 120, 2]


def with_type(path: Path, tensor: str, type_id: int) -> None:
    """Change a tensor's type in the header of a file."""
    content = bytearray(path.read_bytes())
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    at = content.index(name) + len(name)
    n_dims = int.from_bytes(content[at : at + 4], "little")
    struct.pack_into("<I", content, at + 4 + 8 * n_dims, type_id)
    path.write_bytes(content)


def refused(capsys: pytest.CaptureFixture[str], path: Path, *needles: str) -> None:
    """The command line refuses the file: exit code 2, one line with these words."""
    assert main(["run", str(path), "-p", "x", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1, captured.err
    assert not [word for word in needles if word not in captured.err], captured.err


def error_against_oracle(path: Path) -> float:
    """Median over the positions of the normalised squared error of the logits."""
    with LLM(path, device="cpu") as llm, open_gguf(path) as gguf:
        logits = llm.logits(IDS).astype(np.float64)
        expected = naive_logits(gguf, IDS)
    errors = np.sum((logits - expected) ** 2, axis=1) / np.sum(np.asarray(expected, np.float64) ** 2, axis=1)
    return float(np.median(errors))


def test_head_counts_as_arrays(tmp_path: Path) -> None:
    """L09: a scalar and an array of equal numbers mean the same."""
    scalar = write_random_model(tmp_path / "scalar.gguf", quant="f32", block_count=2)
    array = write_random_model(tmp_path / "array.gguf", quant="f32", block_count=2, attention__head_count_kv=[2, 2])
    with LLM(scalar, device="cpu") as one, LLM(array, device="cpu") as other:
        assert np.array_equal(one.logits(IDS), other.logits(IDS))


def test_types_that_cannot_run_are_all_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L13: refused from the header, naming type and tensor."""
    types = {"blk.1.ffn_up_exps.weight": "q1_0", "blk.0.attn_q.weight": "q2_0"}
    monkeypatch.setattr(make_random_gguf, "_mixed_format", lambda name, *_: BY_NAME[types.get(name, "q8_0")])
    monkeypatch.setattr(
        make_random_gguf, "quantize", lambda x, fmt: np.zeros(x.size // fmt.block_elements * fmt.block_bytes, np.uint8)
    )
    path = write_random_model(tmp_path / "refused.gguf", quant="mixed", block_count=2)
    refused(capsys, path, "Q1_0", "blk.1.ffn_up_exps.weight", "Q2_0", "blk.0.attn_q.weight")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T07: refused with the names that are known."""
    path = write_random_model(tmp_path / "pre.gguf", block_count=1)
    content, name = path.read_bytes(), struct.pack("<Q", 5) + b"qwen2"
    assert content.count(name) == 1
    path.write_bytes(content.replace(name, struct.pack("<Q", 5) + b"nosuc"))
    refused(capsys, path, "nosuc", "qwen2", "llama-bpe")


@pytest.mark.parametrize(("n_experts", "top_k"), [(1, 1), (5, 5), (300, 4)])
def test_numbers_of_experts(n_experts: int, top_k: int, tmp_path: Path) -> None:
    """E05: one expert, all of them, and more than 256."""
    path = write_random_model(
        tmp_path / "experts.gguf", quant="f32", tokenizer=False, block_count=2, embedding_length=64,
        expert_feed_forward_length=32, expert_count=n_experts, expert_used_count=top_k,
    )  # fmt: skip
    assert error_against_oracle(path) < 1e-6


@pytest.mark.parametrize("width", [96, 352])
def test_rows_that_no_k_quant_divides(width: int, tmp_path: Path) -> None:
    """Q01: a K mix falls back to types with blocks of 32 where rows are no multiple of 256."""
    path = write_random_model(
        tmp_path / "narrow.gguf", tokenizer=False, embedding_length=320, expert_feed_forward_length=width
    )
    with open_gguf(path) as gguf:
        assert gguf.tensors["blk.0.ffn_down_exps.weight"].format.block_elements == 32
    assert error_against_oracle(path) < 1.5e-3


def test_a_width_that_the_blocks_do_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Q01: such a type in a header is a damaged file."""
    path = write_random_model(tmp_path / "odd.gguf", quant="f32", block_count=1, expert_feed_forward_length=96)
    with_type(path, "blk.0.ffn_down_exps.weight", 12)
    refused(capsys, path, "blk.0.ffn_down_exps.weight", "96")


def test_penalties_count_cached_prompts(tmp_path: Path) -> None:
    """S03: tokens of a prompt that is found again are penalised like those of one that is run."""
    path = write_random_model(tmp_path / "penalties.gguf", quant="f32", tokenizer=False, block_count=2)
    params = SamplingParams(
        max_tokens=16, temperature=0.0, repetition_penalty=1.6, presence_penalty=0.3, frequency_penalty=0.2
    )
    prompt = [IDS * 12]
    with LLM(path, device="cpu") as llm:
        cold, warm = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
        assert cold.cached_tokens == 0 < warm.cached_tokens < warm.prompt_tokens
        assert warm.token_ids == cold.token_ids
        assert llm.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0))[0].token_ids != cold.token_ids
