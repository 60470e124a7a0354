"""Every kernel of matmul and moe compiles without a GPU: all for sm_80 and sm_120, one type of each for the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rimuru.formats.quants import ENGINE_FORMATS
from rimuru.ops.cuda import loader, matmul, moe, moe_kernels, routing
from rimuru.ops.cuda.launch import Kernel

sys.path.insert(0, str(Path(__file__).parent))
import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed"
)


def family(name: str) -> list[Kernel]:
    """Each kernel that knows a tensor type, for one type."""
    strip, tile = moe_kernels.up_matrix_shape(4), moe_kernels.up_matrix_shape(100)
    return [
        matmul.gemv_kernel((name,), 1, 32, 2),
        matmul.strip_kernel((name,), *matmul.linear_strip(4096, 2048, 16)),
        matmul.gemm_kernel((name,), *matmul.gemm_tile(512, 4096)),
        moe_kernels.up_kernel(name, name, 2, *moe.up_shape(2, 16)),
        moe_kernels.down_kernel(name, 2, *moe.down_shape(name, 768, 2, 16)),
        moe_kernels.up_matrix_kernel(name, name, strip),
        moe_kernels.down_matrix_kernel(name, tile),
    ]


COMMON = [
    *matmul.COMMON_KERNELS, *moe.COMMON_KERNELS, routing.route_kernel(128), routing.route_kernel(1000),
    routing.router_kernel(128, 1, 2048), routing.router_kernel(1000, 2), routing.REPLAY_KERNEL,
    matmul.norm_gemv_kernel(("q4_k", "q6_k"), 2880, 32, 2), matmul.norm_gemv_kernel(("f16", "q8_0"), 1024, 8, 1),
    moe_kernels.down_sum_kernel("q6_k", 8, 2, 1024, 8),
    moe_kernels.down_sum_kernel("q5_0", 32, 2, 512, 5, True),
    moe_kernels.down_sum_kernel("q6_k", 8, 2, 1024, 8, listed=True),
    moe_kernels.down_kernel("q4_k", 1, *moe.down_shape("q4_k", 768, 1, 4), listed=True),
    matmul.gemv_kernel(("q4_k", "q6_k"), 8, 32, 2),
    matmul.strip_kernel(("q4_k", "q6_k"), *matmul.linear_strip(4096, 2048, 32)),
    matmul.gemm_kernel(("q4_k", "q6_k"), 128, 64), moe_kernels.up_kernel("q4_k", "q5_k", 8, 8, 2),
    moe_kernels.up_kernel(None, "q5_0", 1, *moe.up_shape(1, 1)),
    moe_kernels.up_kernel("q4_k", "q4_k", 1, *moe.up_shape(1, 8)),
    moe_kernels.up_kernel("q4_k", "q4_k", 1, *moe.up_shape(1, 1), listed=True),
    moe_kernels.up_matrix_kernel("q4_k", "q6_k", moe_kernels.up_matrix_shape(20)),
    moe_kernels.up_matrix_kernel("q4_k", "q6_k", moe_kernels.up_matrix_shape(50)),
    moe_kernels.up_matrix_kernel(None, "q5_0", moe_kernels.up_matrix_shape(50)),
    moe_kernels.up_kernel("nvfp4", "nvfp4", 2, *moe.up_shape(2, 16), True),
    moe_kernels.down_kernel("nvfp4", 2, *moe.down_shape("nvfp4", 768, 2, 16), True),
    moe_kernels.up_matrix_kernel("nvfp4", "nvfp4", moe_kernels.up_matrix_shape(4), True),
    moe_kernels.down_matrix_kernel("nvfp4", moe_kernels.down_matrix_shape(100), True),
]  # fmt: skip
# The decoding headers do not know the architecture, so each type is compiled once, the architectures taking turns.
TYPES = [
    (kernel, (80, 120)[(i + j) % 2])
    for i, fmt in enumerate(ENGINE_FORMATS)
    for j, kernel in enumerate(family(fmt.name))
]
ALL = [
    *TYPES,
    *((kernel, arch) for kernel in COMMON for arch in (80, 120)),
    *((kernel, arch) for kernel in family("q6_k")[:4] for arch in (80, 120)),
    *((kernel, (86, 89, 90)[i % 3]) for i, kernel in enumerate(family("q4_k"))),
]


def label(kernel: Kernel) -> str:
    return f"{kernel.name} " + " ".join(str(value) for _, value in sorted(kernel.defines.items()))


@pytest.mark.parametrize(("kernel", "architecture"), ALL, ids=lambda v: label(v) if isinstance(v, Kernel) else str(v))
def test_compiles(kernel: Kernel, architecture: int) -> None:
    assert kernel.name.encode() in nvrtc.compile_source(kernel.path, kernel.defines, architecture)


MACROS = ("ACT_PARAMETERS", "ITEM_PARAMETERS", "MATRICES", r"ONE_MATRIX\(i\)")


@pytest.mark.parametrize("kernel", [*family("q4_k"), *COMMON], ids=label)
def test_signature_matches_the_source(kernel: Kernel) -> None:
    """A launcher declares as many parameters as its kernel has, with pointers where the kernel has pointers."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n", " ", loader.flatten(kernel.path), flags=re.S)
    found = re.search(rf"__global__[^;{{]*?\b{kernel.name}\((.*?)\)\s*\{{", text, flags=re.S)
    assert found is not None
    parameters = found[1]
    bodies = {name: re.search(rf"#define {name}\s([^\n]*)", text) for name in MACROS}
    for name, body in bodies.items():
        if body is not None and "(" not in name:
            parameters = re.sub(rf"\b{name}\b", lambda _, body=body: body[1], parameters)
    one = bodies[r"ONE_MATRIX\(i\)"]
    if one is not None:
        parameters = re.sub(r"ONE_MATRIX\((\d)\)", lambda m: one[1].replace("##i", m[1]), parameters)
    kinds = []
    for parameter in parameters.split(","):
        words = parameter.replace("__restrict__", " ").split()
        kinds.append("*" if "*" in parameter else {"int": "i32", "i64": "i64", "float": "f32"}[words[0]])
    assert kinds == ["*" if kind.endswith("*") else kind for _, kind in kernel.parameters]


@pytest.mark.parametrize("rows, tokens", [(128, 64), (128, 128)])
def test_shared_memory_of_a_tile_is_what_the_source_says(rows: int, tokens: int) -> None:
    tile_k, x_stages = 64, 3
    assert matmul.tile_shared_bytes(rows, tokens) == 2 * (tile_k + 8) * (2 * rows + x_stages * tokens)
    assert matmul.tile_shared_bytes(rows, tokens) <= 99 * 1024  # of compute capability 8.6, 8.9 and 12.0


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_a_strip_fits_every_card(tokens: int) -> None:
    shapes = [(4, 4, True), (8, 2, True), (8, 1, True), (1, 16, False)]
    assert max(matmul.strip_shared_bytes(tokens, *shape) for shape in shapes) <= 99 * 1024
