"""Every kernel of the pointwise, attention, recurrent and sampling families compiles without a GPU."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

from rimuru.formats.quants import ENGINE_FORMATS
from rimuru.ops.cuda import attention, delta_chunks, embed, head_linear, latent, loader, pointwise, recurrent, sampling
from rimuru.ops.cuda.launch import Kernel

sys.path.insert(0, str(Path(__file__).parent))
import nvrtc

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed"
)

APPEND = [
    attention.append_kernel(kind, last, adjacent, element, 128)
    for kind, last, adjacent, element in (
        ("none", False, True, "f16"), ("head", False, False, "f16"), ("head", True, False, "bf16"),
        ("vector", False, False, "f32"),
    )
]  # fmt: skip
DECODE = [
    attention.decode_kernel(*shape).kernel
    for shape in (
        (128, 128, 8, "f16", False), (256, 256, 8, "f16", False), (64, 64, 16, "bf16", False),
        (80, 80, 1, "f32", False), (192, 128, 5, "f16", False), (160, 96, 8, "f16", True),
    )
] + [
    attention.decode_kernel(*shape).kernel
    for shape in (
        (128, 128, 8, "f16", False, 256, True, ("head", False, False)),
        (128, 128, 8, "f16", False, 256, False, ("head", False, False), True),
        (256, 256, 8, "bf16", False, 256, False, ("none", True, True)),
    )
] + [
    kernel for shape in ((576, 512, 16, "f16"), (288, 256, 5, "bf16")) for kernel in latent.latent_kernels(*shape)
]  # fmt: skip
PREFILL = [
    attention.prefill_kernel(*shape, attention.prefill_tile(*shape[:2]))
    for shape in ((128, 128, "f16"), (256, 256, "f16"), (64, 64, "bf16"), (192, 128, "f16"), (96, 80, "f16"))
] + [attention.prefill_kernel(576, 512, element, attention.LATENT_TILE, True) for element in ("f16", "bf16")]
RECURRENT = [
    *recurrent.conv_kernels(4).values(), *recurrent.conv_kernels(3).values(),
    *recurrent.delta_net_kernels(128, "tiled"), *recurrent.delta_net_kernels(16, "grouped"),
    recurrent.mamba2_kernel(128, 64), recurrent.mamba2_kernel(16, 8), recurrent.mamba1_kernel(16),
    *delta_chunks.chunk_kernels(128, "tiled"), *delta_chunks.chunk_kernels(64, "grouped"),
]  # fmt: skip
KERNELS = [
    *pointwise.KERNELS, *sampling.KERNELS, *APPEND, *DECODE, *PREFILL, *RECURRENT,
    *(embed.embed_kernel(fmt.name) for fmt in ENGINE_FORMATS),
    *(
        head_linear.head_linear_kernel(fmt.name, *((8, 8), (4, 1), (4, 8, True))[i % 3])
        for i, fmt in enumerate(ENGINE_FORMATS)
    ),
]  # fmt: skip
ONE_OF_EACH = [
    pointwise.KERNELS[0], pointwise.KERNELS[3], sampling.KERNELS[0], APPEND[1], DECODE[0], DECODE[-4], PREFILL[0],
    RECURRENT[0], RECURRENT[6], RECURRENT[10], RECURRENT[12],
    embed.embed_kernel("q4_k"), head_linear.head_linear_kernel("q8_0"),
]  # fmt: skip


def sources(kernels: list[Kernel]) -> list[tuple[str, tuple[tuple[str, object], ...]]]:
    """Each (path, defines) once."""
    return sorted({(kernel.path, tuple(sorted(kernel.defines.items()))) for kernel in kernels}, key=str)


FULL = [(source, arch) for source, arch in itertools.product(sources(KERNELS), (80, 120))]
SOME = [(source, arch) for source, arch in itertools.product(sources(ONE_OF_EACH), (86, 89, 90))]


@pytest.mark.parametrize(("source", "architecture"), FULL + SOME, ids=str)
def test_compiles(source: tuple[str, tuple[tuple[str, object], ...]], architecture: int) -> None:
    path, defines = source
    cubin = nvrtc.compile_source(path, dict(defines), architecture)  # type: ignore[arg-type]
    wanted = {kernel.name for kernel in KERNELS if kernel.path == path}
    assert all(name.encode() in cubin for name in wanted)


@pytest.mark.parametrize("path", sorted({kernel.path for kernel in KERNELS}))
def test_signatures_match(path: str) -> None:
    """A launcher declares as many parameters as its kernel has, with pointers where the kernel has pointers."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n", " ", loader.flatten(path), flags=re.S)
    for macro, body in 2 * re.findall(r"#define (ACT_PARAMETERS|CONV_PARAMETERS|GATED_PARAMETERS) +([^\n]*)", text):
        text = re.sub(rf"(?<!define )\b{macro}\b", body, text)
    for kernel in {kernel.name: kernel for kernel in KERNELS if kernel.path == path}.values():
        found = re.search(rf"__global__[^;{{]*?\b{kernel.name}\(([^{{]*?)\)\s*\{{", text, flags=re.S)
        assert found is not None, kernel.name
        kinds = []
        for parameter in found[1].split(","):
            words = parameter.replace("__restrict__", " ").split()
            scalar = {"int": "i32", "long": "i64", "i64": "i64", "float": "f32"}
            kinds.append("*" if "*" in parameter else scalar[words[0]])
        assert kinds == ["*" if kind.endswith("*") else kind for _, kind in kernel.parameters], kernel.name
