"""Loads by the path that nobody keeps coherent: which kernels have any, and of what. Seen in the assembler text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rimuru.ops.cuda import attention, matmul, moe, moe_kernels, pointwise, recurrent, routing, sampling, sorting
from rimuru.ops.cuda.launch import Kernel

sys.path.insert(0, str(Path(__file__).parent))
import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed"
)

WITHOUT = [
    pointwise.KERNELS[0], pointwise.KERNELS[5], sampling.KERNELS[0], sampling.KERNELS[2], sorting.KERNELS[0],
    moe.COMMON_KERNELS[-1], routing.route_kernel(128), recurrent.delta_net_kernels(128, "tiled")[0],
]  # fmt: skip
EXPERTS = [
    moe_kernels.up_kernel("q4_k", "q4_k", 2, *moe.up_shape(2, 16)),
    moe_kernels.down_kernel("q6_k", 2, *moe.down_shape("q6_k", 768, 2, 16)),
    moe_kernels.down_sum_kernel("q6_k", *moe.down_shape("q6_k", 768, 1, 8), 8),
    moe_kernels.up_matrix_kernel("q4_k", "q4_k", moe_kernels.up_matrix_shape(4)),
    moe_kernels.down_matrix_kernel("q4_k", moe_kernels.down_matrix_shape(100)),
]  # fmt: skip


def past_coherence(kernel: Kernel) -> list[str]:
    text = nvrtc.compile_source(kernel.path, kernel.defines, 90, kind="PTX").decode(errors="replace")
    assert "griddepcontrol.wait" in text
    return re.findall(r"ld\.global[.\w]*\.nc\.(\S+)", text)


@pytest.mark.parametrize("kernel", WITHOUT, ids=lambda kernel: kernel.name)
def test_kernels_without_weights_have_none(kernel: Kernel) -> None:
    assert past_coherence(kernel) == []


def test_kernels_of_one_token_ask_for_weights_before_they_wait() -> None:
    """By plain loads, which no compiler moves behind the wait: of the norm, then in vectors of the rows. Past coherence
    comes a bias only."""
    for kernel, n_norm, n_vectors in (
        (routing.router_kernel(128, 1, 2048), 8, 16),
        (matmul.norm_gemv_kernel(("q4_k",), 2048, 32, 2), 8, 6),
        (matmul.gemv_kernel(("q4_k",), 1, 32, 2), 0, 6),
    ):
        ahead = before(kernel, "griddepcontrol.wait")
        assert (ahead.count("ld.global.f32"), ahead.count("ld.global.v4.u32")) == (n_norm, n_vectors), kernel.name
        assert set(past_coherence(kernel)) <= {"f32", "b32"}


@pytest.mark.parametrize(
    ("name", "shape", "asks"), [("q4_k", (8, 1, 8), True), ("q5_k", (8, 1, 8), False), ("q5_k", (8, 1, 16), True)]
)
def test_strips_of_few_rows_ask_for_weights_before_they_wait(
    name: str, shape: tuple[int, int, int], asks: bool
) -> None:
    """Two rows a lane, their blocks in vectors; not where registers are short."""
    kernel = matmul.strip_kernel((name,), *shape, False)
    assert ("ld.global.v4.u32" in before(kernel, "griddepcontrol.wait")) == asks
    assert not asks or set(past_coherence(kernel)) <= {"f32", "b32"}


@pytest.mark.parametrize("kernel", EXPERTS, ids=lambda kernel: kernel.name)
def test_expert_kernels_read_biases_so_and_nothing_else(kernel: Kernel) -> None:
    """Single numbers; packed weights, activations and tables come in words, vectors and addresses."""
    assert set(past_coherence(kernel)) <= {"f32", "b32"}


def test_weights_that_no_kernel_brings_are_read_so() -> None:
    """Otherwise the tests above would see nothing."""
    assert "v4.u32" in "".join(past_coherence(matmul.gemv_kernel(("q4_k",), 2, 32, 2))).replace("b32", "u32")


def before(kernel: Kernel, mark: str) -> str:
    """The kernel's assembler text in front of the first `mark`."""
    text = nvrtc.compile_source(kernel.path, kernel.defines, 90, kind="PTX").decode(errors="replace")
    body = text[text.index(f".entry {kernel.name}") :]
    assert mark in body
    return body[: body.index(mark)]


LISTED = [
    moe_kernels.up_kernel("q4_k", "q4_k", 1, *moe.up_shape(1, 1), listed=True),
    moe_kernels.down_kernel("q4_k", 1, *moe.down_shape("q4_k", 768, 1, 4), listed=True),
    moe_kernels.down_sum_kernel("q4_k", *moe.down_shape("q4_k", 768, 1, 1), 8, listed=True),
    moe_kernels.up_kernel("q4_k", "q4_k", 2, *moe.up_shape(2, 16), listed=True),
    moe_kernels.down_kernel("q6_k", 2, *moe.down_shape("q6_k", 768, 2, 16), listed=True),
    moe_kernels.up_matrix_kernel("q4_k", "q4_k", moe_kernels.up_matrix_shape(4), listed=True),
    moe_kernels.up_matrix_kernel("q4_k", "q4_k", moe_kernels.up_matrix_shape(100), listed=True),
    moe_kernels.down_matrix_kernel("q4_k", moe_kernels.down_matrix_shape(100), listed=True),
]


@pytest.mark.parametrize("kernel", LISTED, ids=lambda kernel: kernel.name)
def test_an_item_and_its_pages_are_asked_for_together(kernel: Kernel) -> None:
    """Left to itself, the compiler asks for the pages behind the branch that has waited for the item."""
    text = nvrtc.compile_source(kernel.path, kernel.defines, 90, kind="PTX").decode(errors="replace")
    text = text[text.index(f".entry {kernel.name}(") :].split(".entry ", 2)[1]
    asks = "ld.relaxed.gpu.global.u64"
    assert text.count(asks) == 2
    until_pages = text[text.index(asks) : text.rindex(asks)]
    assert "bra" not in until_pages and "ret;" not in until_pages and "@%p" not in until_pages


@pytest.mark.parametrize("kernel", [k for k in [*EXPERTS, *LISTED] if "down" in k.name], ids=lambda kernel: kernel.name)
def test_what_down_reads_ahead_is_read_past_the_first_level_cache(kernel: Kernel) -> None:
    """Where to read from, before the kernel waits for the one that makes its input; in the kernel that also sums, the
    first weights too."""
    ahead = before(kernel, "griddepcontrol.wait")
    assert "ld.relaxed.gpu.global" in ahead
    plain = re.findall(r"ld\.global[.\w]*", ahead)
    if kernel.name == "moe_down_sum":
        assert {name for name in plain if "nc" in name} == set()
    else:
        assert plain == []


@pytest.mark.parametrize("wide", [True, False])
def test_attention_reads_ahead_what_was_there_before_the_step(wide: bool) -> None:
    """The batch, its page table and rows of earlier steps past the first-level cache; norms and the rotation's table as
    constants."""
    kernel = attention.decode_kernel(128, 128, 8, "f16", False, 256, wide, ("head", False, False)).kernel
    ahead = before(kernel, "griddepcontrol.wait")
    assert {name for name in re.findall(r"ld\.global[.\w]*", ahead) if ".nc" not in name} == set()
    assert ahead.count("ld.relaxed.gpu.global.s32") >= 4
    assert ahead.count("ld.relaxed.gpu.global.v4") == (16 if wide else 8)
