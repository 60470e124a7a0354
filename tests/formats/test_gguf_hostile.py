"""Damaged and hostile GGUF files: one clear error each, in time and memory bounded by the file's real size."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rimuru.base.errors import BadInputError, FileFormatError, RimuruError
from rimuru.formats import gguf_header
from rimuru.formats.gguf import check_formats, open_gguf
from rimuru.formats.quants import BY_NAME
from rimuru.formats.writer import KeyValue, TensorData, write_gguf

ABSURD = (1 << 62) + 1


def text(raw: bytes | str, n_bytes: int | None = None) -> bytes:
    """A string of the container, with a length that may lie."""
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw) if n_bytes is None else n_bytes) + raw


def key(name: bytes | str, type_id: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value


def info(name: bytes | str, dims: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}qIQ", len(dims), *dims, type_id, offset)


def file(
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"\0" * 64,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_kv: int | None = None,
) -> bytes:
    """A file from its pieces; the data section is placed at a multiple of 32."""
    counts = (len(infos) if n_tensors is None else n_tensors, len(keys) if n_kv is None else n_kv)
    head = magic + struct.pack("<Iqq", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


ALIGN = "general.alignment"
U32 = struct.Struct("<I").pack
F32_OK = info("t", (4,))

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "no GGUF"),
    "wrong magic": (file(magic=b"GGML"), "no GGUF file"),
    "four bytes": (b"GGUF", "cut off"),
    "version 0": (file(version=0), "version 0"),
    "version 1": (file(version=1), "version 1 is not supported"),
    "version 4": (file(version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">Iqq", 3, 0, 0) + bytes(64), r"big-endian GGUF is not .*\(version 3\)"),
    "many tensors": (file(n_tensors=ABSURD), "tensors, more than the file can hold"),
    "negative tensors": (file(n_tensors=-1), "-1 tensors"),
    "many keys": (file(n_kv=ABSURD), "metadata keys, more than"),
    "negative keys": (file(n_kv=-5), "-5 metadata keys"),
    "one key too many": (file((key("a", 0, b"\1"),), n_kv=2, data=bytes(8)), "metadata key"),
    "long key": (file((text("abc", ABSURD),), n_kv=1), "a metadata key is said to have"),
    "empty key": (file((key("", 0, b"\1"),)), "key is empty"),
    "key no utf-8": (file((key(b"\xff\xfe", 0, b"\1"),)), "not valid UTF-8"),
    "bad value type": (file((key("a", 13, bytes(8)),)), "key a has the unknown value type 13"),
    "twice a key": (file((key("a", 0, b"\1"), key("a", 0, b"\2"))), "key a is there twice"),
    "long string": (file((key("a", 8, text("x", ABSURD)),)), "value of key a is said to have"),
    "long array": (file((key("a", 9, struct.pack("<IQ", 4, ABSURD)),)), f"key a announces an array of {ABSURD}"),
    "wrapping array": (file((key("a", 9, struct.pack("<IQ", 12, (1 << 61) + 1)),)), "key a announces"),
    "array past the end": (file((key("a", 9, struct.pack("<IQ", 0, 5000)),)), "key a announces an array of 5000"),
    "many strings": (file((key("a", 9, struct.pack("<IQ", 8, 1 << 29)),)), "key a announces"),
    "long string in array": (file((key("a", 9, struct.pack("<IQ", 8, 2) + text("b") + text("c", 1 << 63)),)), "string"),
    "array of arrays": (file((key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 1) + b"\0"),)), "of arrays"),
    "array of unknown": (file((key("a", 9, struct.pack("<IQ", 77, 1) + bytes(8)),)), "unknown type 77"),
    "alignment 13": (file((key(ALIGN, 4, U32(13)),), (F32_OK,)), "alignment is 13"),
    "alignment 0": (file((key(ALIGN, 4, U32(0)),), (F32_OK,)), "alignment is 0"),
    "alignment i32": (file((key(ALIGN, 5, U32(32)),), (F32_OK,)), "alignment must be of type u32, but is i32"),
    "alignment text": (file((key(ALIGN, 8, text("32")),), (F32_OK,)), "alignment must be of type u32"),
    "alignment huge": (file((key(ALIGN, 4, U32(1 << 31)),), (F32_OK,)), "cut off"),
    "long tensor name": (file(infos=(text("abc", ABSURD) + bytes(40),)), "tensor name is said to have"),
    "name of 64 bytes": (file(infos=(info("n" * 64, (4,)),)), "longer than 63"),
    "name no utf-8": (file(infos=(info(b"\xc3(", (4,)),)), "not valid UTF-8"),
    "twice a tensor": (file(infos=(F32_OK, info("t", (4,), 0, 32))), "tensor t is there twice"),
    "5 dims": (file(infos=(info("t", (1, 1, 1, 1, 1)),)), "tensor t has 5 dim"),
    "dims absurd": (file(infos=(text("t") + U32(0xFFFFFFFF) + bytes(20),)), "tensor t has 4294967295 dim"),
    "dim -1": (file(infos=(info("t", (4, -1)),)), "negative dimension"),
    "product overflow": (file(infos=(info("t", (1 << 32, 1 << 32)),)), "tensor t.* too large"),
    "byte overflow": (file(infos=(info("t", (1 << 62,)),)), "tensor t.* too large"),
    "padded overflow": (file(infos=(info("t", ((1 << 61) - 1,)),)), "cut off"),
    "unknown type": (file(infos=(info("t", (256,), 9999),)), "tensor t has the unknown type id 9999"),
    "removed type": (file(infos=(info("t", (32,), 4),)), "tensor t has the unknown type id 4"),
    "row no multiple": (file(infos=(info("t", (33,), 2),)), "tensor t has rows of 33 .* q4_0 block"),
    "bad offset": (file(infos=(info("t", (4,), 0, 32),)), "tensor t lies at 32"),
    "gap": (file(infos=(F32_OK, info("u", (4,), 0, 64)), data=bytes(128)), "tensor u lies at 64 .* but 32"),
    "overlap": (file(infos=(F32_OK, info("u", (4,), 0, 0)), data=bytes(128)), "tensor u lies at 0"),
    "offset other alignment": (
        file((key(ALIGN, 4, U32(64)),), (F32_OK, info("u", (4,), 0, 32)), data=bytes(128)), "tensor u lies at 32",
    ),
    "data too short": (file(infos=(info("t", (64,)),), data=bytes(255)), "cut off: tensor t"),
    "no data": (file(infos=(F32_OK,), data=b""), "cut off: tensor t"),
}  # fmt: skip

ACCEPTED: dict[str, bytes] = {
    "empty tables": file(),
    "nothing after the counts": file(data=b"")[:24],
    "version 2": file(infos=(F32_OK,), version=2),
    "zero dim": file(infos=(info("t", (4, 0)), info("u", (4,)))),
    "no dims": file(infos=(info("t", ()),)),
    "alignment 1": file((key(ALIGN, 4, U32(1)),), (F32_OK, info("u", (4,), 0, 16))),
    "last tensor not padded": file(infos=(F32_OK,), data=bytes(16)),
    "bytes after the data": file(infos=(F32_OK,), data=bytes(5000)),
    "bool that is 2": file((key("a", 7, b"\2"),)),
    "empty array": file((key("a", 9, struct.pack("<IQ", 8, 0)),)),
}


def use_everything(path: Path) -> None:
    """Open the file and touch all that it offers, as an engine would."""
    with open_gguf(path) as opened:
        for name in opened.kv:
            value = opened.kv[name]
            if hasattr(value, "__iter__"):
                list(value)
            opened.kv.type_name(name)
        for name, tensor in opened.tensors.items():
            opened.read_into(name, 0, np.zeros(tensor.n_bytes, np.uint8))
            assert opened.raw(name).size == tensor.n_bytes
        opened.identity()
        check_formats(opened.tensors)
        assert opened.architecture is not None


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    raw, words = REFUSED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match=words) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ok.gguf"
    path.write_bytes(ACCEPTED[name])
    with open_gguf(path) as opened:
        for tensor in opened.tensors.values():
            assert opened.raw(tensor.name).size == tensor.n_bytes


def sound_file(path: Path) -> bytes:
    kv: list[KeyValue] = [
        ("general.architecture", "str", "qwen3moe"), ("qwen3moe.block_count", "u32", 2), ("x.f", "f32", 1.5),
        ("split.count", "u16", 1), ("general.alignment", "u32", 32), ("flags", "arr", ("bool", [True, False])),
        ("a.i", "arr", ("i32", [1, 2, 3])), ("tokens", "arr", ("str", ["a", "", "bc", "def"])), ("b", "bool", True),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: list[TensorData] = []
    for name, shape, fmt in [("t.weight", (32, 2), "q4_0"), ("u", (3,), "f32"), ("v.weight", (256, 1, 2), "q6_k")]:
        n_bytes = BY_NAME[fmt].row_bytes(shape[0]) * int(np.prod(shape[1:]))
        tensors.append((name, shape, BY_NAME[fmt], rng.integers(0, 256, n_bytes, dtype=np.uint8)))
    write_gguf(path, kv, tensors)
    return path.read_bytes()


def test_cut_off_at_every_byte(tmp_path: Path) -> None:
    raw = sound_file(tmp_path / "ok.gguf")
    with open_gguf(tmp_path / "ok.gguf") as opened:
        last = opened.tensors["v.weight"]
        needed = last.offset_bytes + last.n_bytes
    assert needed < len(raw)  # the padding after the last tensor may be missing
    path = tmp_path / "cut.gguf"
    for n_bytes in range(len(raw)):
        path.write_bytes(raw[:n_bytes])
        if n_bytes >= needed:
            open_gguf(path).close()
            continue
        with pytest.raises(FileFormatError):
            open_gguf(path)


INTERESTING = st.sampled_from(
    [0, 1, 7, 9, 13, 255, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61, 1 << 63, (1 << 64) - 1]
)
MUTATION = st.one_of(
    st.tuples(st.just("byte"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("u32"), st.floats(0, 1), INTERESTING),
    st.tuples(st.just("u64"), st.floats(0, 1), INTERESTING),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("repeat"), st.floats(0, 1), st.integers(1, 64)),
)


def mutated(raw: bytes, mutations: list[tuple[str, float, int]]) -> bytes:
    out = bytearray(raw)
    for kind, where, value in mutations:
        at = int(where * max(len(out) - 1, 0))
        if kind == "byte":
            out[at : at + 1] = bytes((value,))
        elif kind == "u32":
            out[at : at + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")
        elif kind == "u64":
            out[at : at + 8] = value.to_bytes(8, "little")
        elif kind == "cut":
            del out[at:]
        elif kind == "insert":
            out[at:at] = bytes((value,))
        else:
            out[at:at] = out[at : at + value]
    return bytes(out)


@settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_mutated_files_give_errors_or_sound_data(tmp_path: Path, mutations: list[tuple[str, float, int]]) -> None:
    raw = mutated(sound_file(tmp_path / "ok.gguf"), mutations)
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        use_everything(path)
    except RimuruError as error:
        assert isinstance(error, BadInputError) and "\n" not in str(error).replace(str(path), "")
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < (1 << 20)


@pytest.mark.parametrize("what", ["strings", "numbers", "keys", "tensors", "text"])
def test_memory_follows_the_file_and_not_its_numbers(tmp_path: Path, what: str) -> None:
    """A file of 2 MiB that announces as much as the checks let through, and then breaks off."""
    n_bytes = 2 << 20
    filler = bytes(n_bytes)
    raw = {
        "strings": file((key("a", 9, struct.pack("<IQ", 8, n_bytes // 8) + filler[:-64] + text("b", 99)),), data=b""),
        "numbers": file((key("a", 9, struct.pack("<IQ", 0, n_bytes + 64)) + filler,), data=b""),
        "keys": file(tuple(key(f"{i:08d}", 0, b"\1") for i in range(n_bytes // 21)), n_kv=n_bytes // 21 + 1, data=b""),
        "tensors": file(infos=tuple(info(f"{i:08d}", ()) for i in range(n_bytes // 32)), data=b""),
        "text": file((key("a", 8, text(filler, n_bytes + 64)),), data=b""),
    }[what]
    path = tmp_path / "big.gguf"
    path.write_bytes(raw)
    # Python objects of tiny keys and tensors are some 20 times their bytes in the file: a constant factor.
    factor = 30 if what in ("keys", "tensors") else 4
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(FileFormatError):
        open_gguf(path)
    elapsed_s = time.perf_counter() - start
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < factor * len(raw) + (2 << 20)
    assert elapsed_s < 10


def test_a_huge_sparse_file_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 4 << 20)
    path = tmp_path / "sparse.gguf"
    path.write_bytes(file((key("a", 9, struct.pack("<IQ", 8, 1 << 27)),), data=b""))
    with open(path, "r+b") as sparse:
        sparse.truncate(4 << 30)
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="header is larger than 4 MiB"):
        open_gguf(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 32 << 20


def test_not_a_regular_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadInputError, match="no regular file"):
        open_gguf(tmp_path / "pipe.gguf")
