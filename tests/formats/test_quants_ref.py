"""The NumPy decoders against the `gguf` package, and the encoders against the decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from rimuru.formats.quants import BY_ID, BY_NAME, ENGINE_FORMATS, QuantFormat
from rimuru.formats.quants_encode import quantize
from rimuru.formats.quants_grid import GRIDS, even_signs, grid, levels
from rimuru.formats.quants_ref import dequantize

FORMATS = pytest.mark.parametrize("fmt", ENGINE_FORMATS, ids=lambda fmt: fmt.name)


def bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns, with every NaN as the same one."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).view(np.uint32)


@FORMATS
def test_decodes_random_blocks_like_the_gguf_package(fmt: QuantFormat) -> None:
    raw = np.random.default_rng(fmt.ggml_id).integers(0, 256, (3, 40 * fmt.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType(fmt.ggml_id))
    found = dequantize(raw, fmt)
    assert found.shape == (3, 40 * fmt.block_elements) and found.dtype == np.float32
    np.testing.assert_array_equal(bits(found), bits(np.asarray(wanted, np.float32)))


def test_decodes_every_mxfp4_scale_like_the_gguf_package() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    with np.errstate(over="ignore"):
        wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(bits(dequantize(raw, BY_NAME["mxfp4"])), bits(wanted))


def test_decodes_every_nvfp4_scale_like_the_gguf_package() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (64, 36), dtype=np.uint8)
    raw[:, :4] = np.arange(256).reshape(64, 4)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(bits(dequantize(raw, BY_NAME["nvfp4"])), bits(wanted))


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_the_gguf_package(name: str) -> None:
    kind = getattr(gguf.quants, name.upper())
    assert grid(name).shape == kind.grid_shape and grid(name).dtype == np.int8
    np.testing.assert_array_equal(grid(name), kind.grid.reshape(kind.grid_shape))
    assert levels(name) == tuple(kind.grid_map)


def test_sign_indices_are_those_of_the_gguf_package() -> None:
    np.testing.assert_array_equal(even_signs(), np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8))


# Normalised squared error of simple encoders on normal values: about 4^-bits, times a format's own factor.
WORST_NMSE = {
    "f32": 0.0, "f16": 1e-6, "bf16": 1e-5, "q4_0": 1e-2, "q4_1": 1e-2, "q5_0": 2.5e-3, "q5_1": 2.5e-3, "q8_0": 1e-4,
    "q2_k": 0.15, "q3_k": 0.05, "q4_k": 1e-2, "q5_k": 2.5e-3, "q6_k": 1e-3, "iq4_nl": 1e-2, "iq4_xs": 1e-2,
    "mxfp4": 3e-2, "iq1_s": 0.25, "iq1_m": 0.22, "iq2_xxs": 0.14, "iq2_xs": 0.11, "iq2_s": 0.08, "iq3_xxs": 0.045,
    "iq3_s": 0.03, "tq1_0": 0.21, "tq2_0": 0.21, "nvfp4": 2e-2,
}  # fmt: skip


@FORMATS
def test_encoding_keeps_values(fmt: QuantFormat) -> None:
    x = np.random.default_rng(1).normal(0, 0.05, (4, 3, 512)).astype(np.float32)
    raw = quantize(x, fmt)
    assert raw.shape == (4, 3, fmt.row_bytes(512)) and raw.dtype == np.uint8
    back = dequantize(raw, fmt)
    assert np.square(back - x).sum() / np.square(x).sum() <= WORST_NMSE[fmt.name]
    np.testing.assert_array_equal(dequantize(quantize(np.zeros((1, 256)), fmt), fmt), 0)


@FORMATS
def test_rows_decode_alone_as_together(fmt: QuantFormat) -> None:
    raw = quantize(np.random.default_rng(2).normal(size=(5, 256)), fmt)
    together = dequantize(raw, fmt)
    for row in range(5):
        np.testing.assert_array_equal(dequantize(raw[row], fmt), together[row])


def test_table_agrees_with_the_gguf_package() -> None:
    for fmt in BY_ID.values():
        if fmt.name in ("q8_1", "q8_k"):  # never in files; the package describes an older layout
            continue
        try:
            kind = gguf.GGMLQuantizationType(fmt.ggml_id)
        except ValueError:  # newer than the installed package
            continue
        assert gguf.GGML_QUANT_SIZES[kind] == (fmt.block_elements, fmt.block_bytes), fmt.name


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of a q4_0 block"):
        dequantize(np.zeros(19, np.uint8), BY_NAME["q4_0"])
    with pytest.raises(ValueError, match="no multiple of a q4_k block"):
        quantize(np.zeros(32), BY_NAME["q4_k"])
    with pytest.raises(KeyError):
        dequantize(np.zeros(292, np.uint8), BY_NAME["q8_k"])
