"""Bytes of host memory by address, and the stored number types. Shared by the reference and the CPU backend."""

from __future__ import annotations

import ctypes

import numpy as np

from rimuru.base.errors import AuditError


def bytes_at(address: int, n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] on the memory at an address, without a copy. The caller keeps that memory alive."""
    if address == 0:
        raise AuditError(f"a view of {n_bytes} bytes was asked for at address 0")
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=np.uint8)


def elements_at(address: int, n_elements: int, element: str) -> np.ndarray:
    """The stored elements at an address, without a copy: float32, float16, or uint16 for bf16."""
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[element]
    return bytes_at(address, n_elements * np.dtype(dtype).itemsize).view(dtype)


def decode(stored: np.ndarray, element: str) -> np.ndarray:
    """Stored elements as float32 (exact)."""
    if element == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def encode(values: np.ndarray, element: str) -> np.ndarray:
    """Values in a stored type, rounded to nearest even: float32, float16, or uint16 for bf16."""
    if element == "f32":
        return values.astype(np.float32)
    if element == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
