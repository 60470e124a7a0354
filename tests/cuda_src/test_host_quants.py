"""The CUDA headers of the tensor types, compiled for the host, against the NumPy decoders."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cases.matmul import random_rows

from rimuru.formats.quants import ENGINE_FORMATS, QuantFormat
from rimuru.formats.quants_ref import dequantize
from rimuru.ops.cuda import loader

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("host")
    out = folder / "quants.so"
    for path, text in loader.WRITTEN.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text())
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    include = [f"-I{HERE.parents[1] / 'cuda_src'}", f"-I{folder}"]
    subprocess.run([*command, *include, str(HERE / "host_quants.cpp"), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def mixed_rows(rng: np.random.Generator, fmt: QuantFormat, n_rows: int, n_in: int) -> np.ndarray:
    """Random rows; MXFP4 and NVFP4 with scales from the whole range."""
    rows = random_rows(rng, fmt, n_rows, n_in)
    if fmt.name == "mxfp4":
        blocks = rows.reshape(-1, fmt.block_bytes)
        blocks[:, 0] = rng.choice([0, 1, 2, 100, 120, 127, 130, 200], len(blocks))
    if fmt.name == "nvfp4":
        rows.reshape(-1, fmt.block_bytes)[:, :4] = rng.integers(0, 256, (rows.size // fmt.block_bytes, 4))
    return rows


def quantize_act(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 8-bit form of cuda_src/common/types.cuh of one row."""
    blocks = x.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float32)
    values = np.rint(blocks / np.maximum(scales, 1e-37)[:, None]).astype(np.int8)
    sums = values.reshape(-1, 2, 16).sum(axis=2, dtype=np.int32)
    return values.reshape(-1), scales, ((sums[:, 0] & 0xFFFF) | (sums[:, 1] << 16)).astype(np.int32)


@pytest.mark.parametrize("fmt", ENGINE_FORMATS, ids=lambda f: f.name)
def test_decoding_is_exact(library: ctypes.CDLL, fmt: QuantFormat) -> None:
    rng = np.random.default_rng(fmt.ggml_id)
    n_in = 1024 if fmt.block_elements == 256 else 320
    rows = mixed_rows(rng, fmt, 5, n_in)
    want = dequantize(rows, fmt)
    # Each row is decoded in place (odd addresses where the block size is odd), and with a word of memory around it.
    memory = np.zeros(rows.size + 32, np.uint8)
    start = (-memory.ctypes.data) % 16
    memory[start : start + rows.size] = rows.reshape(-1)
    got = np.full((5, n_in), np.nan, np.float32)
    decode = getattr(library, f"decode_{fmt.name}")
    for i in range(5):
        address = memory.ctypes.data + start + i * rows.shape[1]
        decode(ctypes.c_void_p(address), n_in // 32, ctypes.c_void_p(got[i].ctypes.data))
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("fmt", [f for f in ENGINE_FORMATS if not f.is_float], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["normal", "constant 3000"])
def test_integer_dot_equals_the_product_with_decoded_activations(
    library: ctypes.CDLL, fmt: QuantFormat, kind: str
) -> None:
    rng = np.random.default_rng(100 + fmt.ggml_id)
    n_in = 512 if fmt.block_elements == 256 else 320
    rows = mixed_rows(rng, fmt, 1, n_in)
    x = rng.standard_normal(n_in).astype(np.float32) if kind == "normal" else np.full(n_in, 3000, np.float32)
    values, scales, sums = quantize_act(x)
    memory = np.zeros(rows.size + 32, np.uint8)
    start = (-memory.ctypes.data) % 16
    memory[start : start + rows.size] = rows.reshape(-1)
    aligned = np.zeros(n_in + 16, np.int8)
    first = (-aligned.ctypes.data) % 16
    aligned[first : first + n_in] = values
    dot = getattr(library, f"dot_{fmt.name}")
    dot.restype = ctypes.c_float
    pointers = (aligned.ctypes.data + first, scales.ctypes.data, sums.ctypes.data)
    got = dot(ctypes.c_void_p(memory.ctypes.data + start), n_in // 32, *(ctypes.c_void_p(p) for p in pointers))
    weights = dequantize(rows, fmt)[0].astype(np.float64)
    activations = values.astype(np.float64) * np.repeat(scales.astype(np.float64), 32)
    magnitude = np.abs(weights * activations).sum()
    assert abs(got - weights @ activations) <= 2e-6 * magnitude


def test_mxfp4_with_the_smallest_exponents_keeps_its_value(library: ctypes.CDLL) -> None:
    row = np.zeros(17 + 32, np.uint8)
    row[1] = 0x01  # element 0: level 0.5, element 16: 0
    x = np.zeros(32, np.float32)
    x[0] = 127.0 * 1e6
    values, scales, sums = quantize_act(x)
    aligned = np.zeros(64, np.int8)
    first = (-aligned.ctypes.data) % 16
    aligned[first : first + 32] = values
    library.dot_mxfp4.restype = ctypes.c_float
    for exponent in (0, 1, 2):
        row[0] = exponent
        pointers = (row.ctypes.data, 1, aligned.ctypes.data + first, scales.ctypes.data, sums.ctypes.data)
        got = library.dot_mxfp4(*(ctypes.c_void_p(p) if i != 1 else p for i, p in enumerate(pointers)))
        assert got == pytest.approx(0.5 * 2.0 ** (exponent - 127) * 1.27e8, rel=1e-6)
