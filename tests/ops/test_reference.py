"""Every backend has the verbs of `Ops` under the same names and parameters; the reference's own small helpers."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from rimuru.base.env import jit_disabled
from rimuru.base.errors import AuditError, BadInputError, NotEnoughMemoryError
from rimuru.ops import create
from rimuru.ops.base import Copier, Ops, PoolMemory
from rimuru.ops.cpu import CpuOps
from rimuru.ops.host import HostCopier, HostPool, bytes_at, decode, encode
from rimuru.ops.reference import ReferenceOps


def _parameters(function: object, drop_self: bool) -> list[tuple[str, object]]:
    found = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]
    return found[1:] if drop_self else found


def _verbs(protocol: type) -> list[str]:
    return [n for n, v in vars(protocol).items() if not n.startswith("_") and inspect.isfunction(v)]


@pytest.mark.parametrize("backend", [ReferenceOps, CpuOps], ids=lambda backend: backend.__name__)
def test_verbs_have_the_protocols_signatures(backend: type) -> None:
    ops = backend()
    assert len(_verbs(Ops)) > 30
    for name in _verbs(Ops):
        assert _parameters(getattr(ops, name), False) == _parameters(getattr(Ops, name), True), name


@pytest.mark.parametrize(("protocol", "made"), [(Copier, HostCopier()), (PoolMemory, HostPool(4096, 8192))])
def test_memory_classes_have_the_protocols_signatures(protocol: type, made: object) -> None:
    for name in _verbs(protocol):
        assert _parameters(getattr(made, name), False) == _parameters(getattr(protocol, name), True), name


def test_create_names_the_choices() -> None:
    assert create("cpu", 2).name == ("reference" if jit_disabled() else "cpu")
    assert create("reference").name == "reference"
    with pytest.raises(BadInputError, match="cpu, cuda or reference"):
        create("npu")


@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
def test_stored_numbers_round_to_nearest_even(element: str) -> None:
    values = np.array([0.0, -1.5, 1.00390625, 1.01171875, 3e38, -7e4, 1e-6, np.inf], np.float32)
    back = decode(encode(values, element), element)
    bits = {"f32": 24, "f16": 11, "bf16": 8}[element]
    for value, stored in zip(values, back, strict=True):
        if element == "f16" and abs(value) >= 65520:
            assert np.isinf(stored)
        elif element == "f16" and abs(value) < 6e-5:
            assert abs(stored - value) <= 2.0**-25
        elif np.isfinite(value) and value:
            assert abs(stored - value) <= abs(value) * 2.0**-bits
    assert encode(np.array([np.nan], np.float32), element).view(np.uint8).any()
    assert np.isnan(decode(encode(np.array([np.nan], np.float32), element), element)).all()


def test_pool_keeps_addresses_and_content_while_it_grows_and_shrinks() -> None:
    pool = HostPool(1 << 20, 64 << 20)
    base = pool.base
    bytes_at(base, 1 << 20)[:] = 7
    pool.resize(32 << 20)
    assert (pool.base, pool.mapped_bytes) == (base, 32 << 20)
    assert (bytes_at(base, 1 << 20) == 7).all() and not bytes_at(base + (1 << 20), 4096).any()
    bytes_at(base + (16 << 20), 4096)[:] = 9
    pool.resize(1 << 20)
    pool.resize(32 << 20)
    assert (bytes_at(base, 1 << 20) == 7).all()
    with pytest.raises(NotEnoughMemoryError, match="cannot grow"):
        pool.resize(65 << 20)
    pool.close()
    assert pool.mapped_bytes == 0


def test_copier_moves_bytes() -> None:
    pool, copier = HostPool(1 << 16, 1 << 16), HostCopier()
    source = np.arange(1000, dtype=np.float32)
    copier.copy_in(pool.base + 64, source)
    copier.copy_within(pool.base + 8192, pool.base + 64, source.nbytes)
    copier.fill(pool.base + 64, 4, 0xFF)
    target = copier.alloc_host(source.nbytes)
    copier.copy_out(target, pool.base + 8192)
    marker = copier.record()
    copier.wait(marker)
    assert copier.done(marker) and np.array_equal(target.view(np.float32), source)
    assert bytes_at(pool.base + 64, 4).tolist() == [255] * 4
    assert copier.alloc_host(0).size == 0
    with pytest.raises(AuditError):
        bytes_at(0, 4)
