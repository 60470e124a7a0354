"""What the compiler may not do: fuse a product and a sum in one variant of a kernel and not in another."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rimuru.ops.cuda.matmul import gemv_kernel

sys.path.insert(0, str(Path(__file__).parent))
import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed"
)


def float_operations(path: str, defines: dict[str, int | str], root: Path | None = None) -> list[str]:
    text = nvrtc.compile_source(path, defines, 90, root, "PTX").decode()
    return re.findall(r"\b((?:fma|mul|add|sub)\.[a-z.]*f32)\b", text)


def test_products_and_sums_are_rounded_apart(tmp_path: Path) -> None:
    """Every product and sum asks for its own rounding: without `.rn` the assembler might still fuse them."""
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void k(float* x, float a, float b) { x[0] = x[0] + a * b; x[1] = fmaf(a, b, x[1]); }'
    )
    found = float_operations("k.cu", {}, tmp_path)
    assert sorted(name.split(".")[0] for name in found) == ["add", "fma", "mul"]
    assert all(".rn" in name for name in found)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("tile", [1, 2, 8])
def test_variants_of_a_product_finish_alike(tile: int, rows: int) -> None:
    """qwen35moe's answers depended on the batch: `out + scale * row_scale * y` was fused for two rows a lane only.

    All multiply-adds of the kernel belong to its dot products: four a row and token and pair of pieces in flight.
    """
    kernel = gemv_kernel(("q4_k",), tile, 8, rows)
    found = float_operations(kernel.path, kernel.defines)
    fused = sum(name.startswith("fma") for name in found)
    assert fused and fused % (4 * rows * tile) == 0
    assert all(".rn" in name for name in found)
