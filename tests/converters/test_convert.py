"""Conversion to a blob and reading it back: round trip, interruption, damage, stale sources, free space."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from converters import gguf_to_blobs, publish
from converters.gguf_to_blobs import convert, default_target
from converters.verify import verify_blob
from rimuru.base.errors import BadInputError, FileFormatError, StoreReadError
from rimuru.experts.source import BlobExpertSource, GgufExpertSource, open_source
from rimuru.formats.expert_blob import BLOB_NAME, ExpertBlob, is_blob_folder, read_expert_pages
from rimuru.formats.gguf import GgufFile, open_gguf
from rimuru.formats.manifest import MANIFEST_NAME, Manifest
from rimuru.formats.quants import BY_NAME
from rimuru.formats.writer import TensorData, write_gguf
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout, ProjectionLayout, ProjectionName

PAGE_BYTES = 8192
Matrix = tuple[ProjectionName, str, int, int, int, int, str]
"""(projection, tensor, first row, rows of an expert in the tensor, rows, input width, format)."""

LAYERS: dict[int, tuple[int, list[Matrix]]] = {
    # Three formats in one layer, pages that hold 56, 37 and 120 rows.
    1: (5, [
        ("gate", "blk.1.ffn_gate_exps.weight", 0, 100, 100, 256, "q4_k"),
        ("up", "blk.1.ffn_up_exps.weight", 0, 100, 100, 256, "q6_k"),
        ("down", "blk.1.ffn_down_exps.weight", 0, 256, 256, 64, "q8_0"),
    ]),
    # Gate and up in one tensor.
    2: (3, [
        ("gate", "blk.2.ffn_gate_up_exps.weight", 0, 80, 40, 96, "q5_0"),
        ("up", "blk.2.ffn_gate_up_exps.weight", 40, 80, 40, 96, "q5_0"),
        ("down", "blk.2.ffn_down_exps.weight", 0, 96, 96, 40, "f16"),
    ]),
    # No gate.
    4: (2, [
        ("up", "blk.4.ffn_up_exps.weight", 0, 7, 7, 32, "mxfp4"),
        ("down", "blk.4.ffn_down_exps.weight", 0, 32, 32, 7, "f32"),
    ]),
}  # fmt: skip


def make_layout(page_bytes: int = PAGE_BYTES) -> ExpertLayout:
    layers = []
    for block, (n_experts, matrices) in LAYERS.items():
        projections: list[ProjectionLayout] = []
        for name, tensor, tensor_row, tensor_rows, n_rows, n_in, fmt_name in matrices:
            fmt = BY_NAME[fmt_name]
            rows_per_page = page_bytes // fmt.row_bytes(n_in)
            projections.append(
                ProjectionLayout(
                    name=name, tensor=tensor, tensor_row=tensor_row, tensor_rows=tensor_rows, n_rows=n_rows,
                    n_in=n_in, row_bytes=fmt.row_bytes(n_in), format=fmt, rows_per_page=rows_per_page,
                    n_pages=-(-n_rows // rows_per_page), first_page=sum(p.n_pages for p in projections),
                )
            )  # fmt: skip
        layers.append(ExpertLayerLayout(block, n_experts, sum(p.n_pages for p in projections), tuple(projections)))
    return ExpertLayout(page_bytes, tuple(layers))


def expert_tensors(seed: int = 0) -> list[TensorData]:
    rng = np.random.default_rng(seed)
    shapes = {
        tensor: ((n_in, tensor_rows, n_experts), BY_NAME[fmt])
        for n_experts, matrices in LAYERS.values()
        for _, tensor, _, tensor_rows, _, n_in, fmt in matrices
    }
    return [
        (name, shape, fmt, rng.integers(0, 256, fmt.row_bytes(shape[0]) * shape[1] * shape[2], dtype=np.uint8))
        for name, (shape, fmt) in shapes.items()
    ]


def write_model(path: Path, seed: int = 0) -> Path:
    dense: TensorData = ("token_embd.weight", (32, 4), BY_NAME["f32"], np.zeros(512, np.uint8))
    write_gguf(path, [("general.architecture", "str", "qwen3moe")], [dense, *expert_tensors(seed)])
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def convert_model(model: Path, target: Path, verify: bool = False) -> Manifest:
    with open_gguf(model) as gguf:
        return convert(gguf, make_layout(), target, verify=verify)


def read_all(source: BlobExpertSource | GgufExpertSource) -> list[np.ndarray]:
    out = []
    for slot, layer in enumerate(source.layout.layers):
        for expert in range(layer.n_experts):
            pages = np.full((layer.n_pages, source.layout.page_bytes), 0xAA, np.uint8)
            source.read_expert(slot, expert, pages)
            assert pages.nbytes == source.expert_bytes(slot)
            out.append(pages)
    return out


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pages_hold_the_rows_of_the_file(model: Path) -> None:
    """Against the address rule written out for every row: row n in page first + n // rows_per_page."""
    tensors = {name: (fmt, shape, raw) for name, shape, fmt, raw in expert_tensors()}
    with open_gguf(model) as gguf:
        found = iter(read_all(GgufExpertSource(gguf, make_layout())))
    for block, (n_experts, matrices) in LAYERS.items():
        layer = next(layer for layer in make_layout().layers if layer.layer == block)
        for expert in range(n_experts):
            pages = next(found)
            wanted = np.zeros_like(pages)
            for (_, tensor, tensor_row, tensor_rows, n_rows, _, _), projection in zip(
                matrices, layer.projections, strict=True
            ):
                rows = tensors[tensor][2].reshape(n_experts, tensor_rows, -1)[expert, tensor_row : tensor_row + n_rows]
                for n, row in enumerate(rows):
                    page, slot = divmod(n, projection.rows_per_page)
                    start = slot * projection.row_bytes
                    wanted[projection.first_page + page, start : start + row.size] = row
            np.testing.assert_array_equal(pages, wanted)


def test_round_trip(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.rimuru"
    steps: list[tuple[int, int]] = []
    with open_gguf(model) as gguf:
        manifest = convert(gguf, make_layout(), target, lambda *step: steps.append(step), verify=True)
        wanted = read_all(GgufExpertSource(gguf, make_layout()))
    assert names_in(target) == {MANIFEST_NAME, BLOB_NAME} and names_in(tmp_path) == {"model.gguf", "model.rimuru"}
    assert is_blob_folder(target) and not is_blob_folder(tmp_path)
    assert len(steps) == 20 and steps[-1] == (2 * manifest.n_bytes,) * 2 and steps == sorted(steps)
    assert Manifest.load(target / MANIFEST_NAME) == manifest
    gguf, source = open_source(target)
    with gguf:
        assert gguf.architecture == "qwen3moe" and source.layout == make_layout()
        for found, right in zip(read_all(source), wanted, strict=True):
            np.testing.assert_array_equal(found, right)
        source.close()
    # Every expert is one run of whole pages, and the manifest says where each projection lies.
    raw = np.fromfile(target / BLOB_NAME, np.uint8)
    assert raw.size == manifest.n_bytes and raw.size % PAGE_BYTES == 0
    np.testing.assert_array_equal(raw, np.concatenate([pages.ravel() for pages in wanted]))
    for layer, entry in zip(make_layout().layers, manifest.layers, strict=True):
        for projection, item in zip(layer.projections, entry.projections, strict=True):
            assert item.n_bytes == projection.n_bytes and len(item.crc32) == layer.n_experts
            assert all(offset % PAGE_BYTES == 0 for offset in item.offset_bytes)


def test_direct_reads_give_the_same(model: Path, tmp_path: Path) -> None:
    convert_model(model, tmp_path / "m.rimuru")
    plain, direct = ExpertBlob(tmp_path / "m.rimuru"), ExpertBlob(tmp_path / "m.rimuru", direct=True)
    layer = plain.manifest.layers[0]
    n_bytes = layer.n_pages * PAGE_BYTES
    memory = np.zeros(n_bytes + 2 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    wanted = np.zeros((layer.n_pages, PAGE_BYTES), np.uint8)
    for shift in (0, 64):  # on a page of memory, and not
        out = memory[start + shift : start + shift + n_bytes].reshape(layer.n_pages, PAGE_BYTES)
        for expert in range(layer.n_experts):
            direct.read_expert(0, expert, out, check=True)
            plain.read_expert(0, expert, wanted, check=True)
            np.testing.assert_array_equal(out, wanted)
    plain.close()
    direct.close()
    with pytest.raises(StoreReadError, match="was closed"):
        direct.read_expert(0, 0, wanted, check=False)


@pytest.mark.parametrize("kind", ["blob", "gguf"])
def test_reads_for_steps_give_the_same(model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections side by side, past the page cache where that can be; an error is raised when all have ended."""
    convert_model(model, tmp_path / "m.rimuru")
    gguf, blob = open_source(tmp_path / "m.rimuru")
    source = blob if kind == "blob" else GgufExpertSource(gguf, blob.layout)
    expected = read_all(source)
    source.read_for_steps(4)
    assert all(np.array_equal(a, b) for a, b in zip(read_all(source), expected, strict=True))
    assert kind == "gguf" or blob.is_direct == (blob._blob._direct_fd is not None)
    ended: list[int] = []
    numbers = iter(range(99))
    target, name = (
        (blob._blob, "read_projection")
        if kind == "blob"
        else (sys.modules[type(source).__module__], "read_projection_pages")
    )
    original = getattr(target, name)

    def late(*args: object) -> None:
        number = next(numbers)
        time.sleep(0.02 * number)
        original(*args)
        ended.append(number)
        if number == 0:
            raise StoreReadError("the disk is gone")

    monkeypatch.setattr(target, name, late, raising=False)
    layer = blob.layout.layers[0]
    with pytest.raises(StoreReadError, match="gone"):
        source.read_expert(0, 0, np.zeros((layer.n_pages, PAGE_BYTES), np.uint8))
    assert sorted(ended) == list(range(len(layer.projections)))
    monkeypatch.undo()
    with ThreadPoolExecutor(8) as pool:  # more than are read in parts
        outs = [np.zeros((layer.n_pages, PAGE_BYTES), np.uint8) for _ in range(40)]
        list(pool.map(lambda out: source.read_expert(0, 0, out), outs))
    assert all(np.array_equal(out, expected[0]) for out in outs)
    source.close()
    blob.close()
    gguf.close()


def test_several_threads_read_one_source(model: Path, tmp_path: Path) -> None:
    convert_model(model, tmp_path / "m.rimuru")
    gguf, source = open_source(tmp_path / "m.rimuru")
    with gguf, ThreadPoolExecutor(4) as pool:
        direct = GgufExpertSource(gguf, source.layout)
        wanted = read_all(direct)

        def same(reader: BlobExpertSource | GgufExpertSource) -> bool:
            return all(np.array_equal(a, b) for a, b in zip(read_all(reader), wanted, strict=True))

        assert all(pool.map(same, [source, direct] * 8))
        source.close()
    with pytest.raises(StoreReadError, match="was closed"):
        read_all(source)


def test_converting_again_replaces_the_folder(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.rimuru"
    convert_model(model, target)
    write_model(model, seed=1)
    with pytest.raises(FileFormatError, match="has changed since the conversion; run `rimuru convert` again"):
        open_source(target)
    convert_model(model, target)
    gguf, source = open_source(target)
    with gguf:
        wanted = read_all(GgufExpertSource(gguf, make_layout()))
        assert all(np.array_equal(a, b) for a, b in zip(read_all(source), wanted, strict=True))
    assert names_in(tmp_path) == {"model.gguf", "model.rimuru"}


def test_replacing_without_an_exchange(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
    convert_model(model, tmp_path / "model.rimuru")
    convert_model(model, tmp_path / "model.rimuru", verify=True)
    open_source(tmp_path / "model.rimuru")[0].close()
    assert names_in(tmp_path) == {"model.gguf", "model.rimuru"}


@pytest.mark.parametrize("change", ["one byte", "touched", "longer", "removed", "another model"])
def test_a_changed_source_is_refused(model: Path, tmp_path: Path, change: str) -> None:
    target = tmp_path / "model.rimuru"
    convert_model(model, target)
    raw = bytearray(model.read_bytes())
    if change == "one byte":
        raw[-100] ^= 1
        model.write_bytes(raw)
    elif change == "touched":
        os.utime(model, ns=(1, 1))
    elif change == "longer":
        model.write_bytes(raw + b"x")
    elif change == "removed":
        model.unlink()
    else:
        write_gguf(model, [("general.architecture", "str", "llama")], [])
    words = "is missing; bring it back" if change == "removed" else "has changed"
    with pytest.raises(FileFormatError, match=words):
        open_source(target)


def test_model_and_blob_move_together(model: Path, tmp_path: Path) -> None:
    convert_model(model, tmp_path / "model.rimuru")
    (tmp_path / "elsewhere").mkdir()
    for name in ("model.gguf", "model.rimuru"):
        shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
    gguf, _ = open_source(tmp_path / "elsewhere" / "model.rimuru")
    gguf.close()
    shutil.move(
        tmp_path / "elsewhere" / "model.gguf", model
    )  # only the blob stays elsewhere: the absolute path finds it
    open_source(tmp_path / "elsewhere" / "model.rimuru")[0].close()


def test_damage_is_found_on_the_first_read(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.rimuru"
    manifest = convert_model(model, target)
    up = manifest.layers[1].projections[1]
    with open(target / BLOB_NAME, "r+b") as file:
        file.seek(up.offset_bytes[2] + 17)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte[0] ^ 4,)))
    gguf, source = open_source(target)
    out = np.zeros((manifest.layers[1].n_pages, PAGE_BYTES), np.uint8)
    source.read_expert(1, 1, out)
    for _ in range(2):  # a failed check is not remembered as a good one
        with pytest.raises(StoreReadError, match=r"expert 2 of block 2 is damaged: wrong checksum of up"):
            source.read_expert(1, 2, out)
    with pytest.raises(StoreReadError, match="expert 2 of block 2"):
        verify_blob(target, gguf, make_layout())
    with open(target / BLOB_NAME, "r+b") as file:
        file.truncate(up.offset_bytes[2])
    with pytest.raises(StoreReadError, match=r"expert 2 of block 2 could not be read: the file ends"):
        source.read_expert(1, 2, out)
    gguf.close()
    with pytest.raises(FileFormatError, match=r"bytes instead of"):
        ExpertBlob(target)


def test_verify_compares_with_the_file_and_not_with_the_checksum(model: Path, tmp_path: Path) -> None:
    convert_model(model, tmp_path / "model.rimuru")
    other = write_model(tmp_path / "other.gguf", seed=3)
    with (
        open_gguf(other) as gguf,
        pytest.raises(StoreReadError, match=r"expert 0 of block 1: gate differs from blk\.1"),
    ):
        verify_blob(tmp_path / "model.rimuru", gguf, make_layout())


def test_no_space(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(gguf_to_blobs.shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    with pytest.raises(BadInputError, match=r"4\.\d MiB \(\d+ bytes\), but only 1\.2 KiB \(1234 bytes\) are free"):
        convert_model(model, tmp_path / "model.rimuru")
    assert names_in(tmp_path) == {"model.gguf"}


def test_a_failed_write_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_to_blobs, "projection_crc32", full_disk)
    with pytest.raises(BadInputError, match=r"cannot be written: No space left"):
        convert_model(model, tmp_path / "model.rimuru")
    assert names_in(tmp_path) == {"model.gguf"}


def test_what_is_not_a_conversion_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "holiday.jpg").write_bytes(b"x")
    for name in ("file", "full"):
        with pytest.raises(BadInputError, match="something else is there"):
            convert_model(model, tmp_path / name)
    convert_model(write_model(tmp_path / "other.gguf"), tmp_path / "other.rimuru")
    with pytest.raises(BadInputError, match=r"holds the experts of .*other\.gguf"):
        convert_model(model, tmp_path / "other.rimuru")
    with pytest.raises(BadInputError, match="cannot be written"):
        convert_model(model, tmp_path / "file" / "below.rimuru")
    (tmp_path / "empty").mkdir()
    convert_model(model, tmp_path / "empty")
    (tmp_path / "empty" / MANIFEST_NAME).write_text("{")  # a damaged conversion may be replaced
    convert_model(model, tmp_path / "empty")
    assert (tmp_path / "full" / "holiday.jpg").read_bytes() == b"x"


def test_two_conversions_to_one_folder(model: Path, tmp_path: Path) -> None:
    with (
        publish.staging_folder(tmp_path / "model.rimuru"),
        pytest.raises(BadInputError, match="another conversion to this folder is running"),
    ):
        convert_model(model, tmp_path / "model.rimuru")
    convert_model(model, tmp_path / "model.rimuru")


def test_leftovers_of_a_killed_conversion_are_cleared(model: Path, tmp_path: Path) -> None:
    leftovers = tmp_path / ".model.rimuru.partial"
    (leftovers / "folder").mkdir(parents=True)
    (leftovers / BLOB_NAME).write_bytes(b"half")
    convert_model(model, tmp_path / "model.rimuru", verify=True)
    assert names_in(tmp_path) == {"model.gguf", "model.rimuru"}
    assert names_in(tmp_path / "model.rimuru") == {MANIFEST_NAME, BLOB_NAME}


def test_models_without_experts_and_foreign_layouts(model: Path, tmp_path: Path) -> None:
    with open_gguf(model) as gguf:
        with pytest.raises(BadInputError, match="has no experts"):
            convert(gguf, ExpertLayout(PAGE_BYTES, ()), tmp_path / "x.rimuru")
        del gguf.tensors["blk.2.ffn_down_exps.weight"]
        with pytest.raises(FileFormatError, match=r"blk\.2\.ffn_down_exps\.weight is missing"):
            convert(gguf, make_layout(), tmp_path / "x.rimuru")
        gguf.tensors["blk.2.ffn_down_exps.weight"] = gguf.tensors["blk.1.ffn_down_exps.weight"]
        with pytest.raises(FileFormatError, match=r"does not hold 3 experts of 96 rows of 40 f16"):
            GgufExpertSource(gguf, make_layout())


def test_default_target(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.b.gguf", [], [])
    with open_gguf(tmp_path / "a.b.gguf") as gguf:
        assert default_target(gguf) == tmp_path / "a.b.rimuru"
    for index in range(2):
        keys = [("split.no", "u16", index), ("split.count", "u16", 2), ("split.tensors.count", "i32", 0)]
        write_gguf(tmp_path / f"big-{index + 1:05d}-of-00002.gguf", keys, [])  # type: ignore[arg-type]
    with open_gguf(tmp_path / "big-00002-of-00002.gguf") as gguf:
        assert default_target(gguf) == tmp_path / "big.rimuru"


def test_memory_stays_flat(tmp_path: Path) -> None:
    """64 experts of 96 KiB: conversion and verification hold a few of them at a time, whatever the file's size."""
    fmt, n_experts = BY_NAME["f32"], 64
    raw = np.random.default_rng(0).integers(0, 256, 256 * 32 * 4 * n_experts, dtype=np.uint8)
    names: tuple[ProjectionName, ...] = ("gate", "up", "down")
    tensors = [(f"blk.0.ffn_{name}_exps.weight", (256, 32, n_experts), fmt, raw) for name in names]
    write_gguf(tmp_path / "m.gguf", [("general.architecture", "str", "x")], tensors)
    projections = tuple(
        ProjectionLayout(name, tensors[i][0], 0, 32, 32, 256, 1024, fmt, 32, 1, i) for i, name in enumerate(names)
    )
    layout = ExpertLayout(32768, (ExpertLayerLayout(0, n_experts, 3, projections),))
    with open_gguf(tmp_path / "m.gguf") as gguf:
        tracemalloc.start()
        convert(gguf, layout, tmp_path / "m.rimuru", verify=True)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 8 * 3 * 32768


MANGLED: list[tuple[str, object]] = [
    ("version", 2), ("format", "x"), ("page_bytes", 0), ("page_bytes", 100), ("page_bytes", True), ("n_bytes", 5),
    ("layers", {}), ("layers", [1]), ("source", 3), ("architecture", None), ("layers.0.n_experts", 1 << 40),
    ("layers.0.n_experts", 4), ("layers.0.n_pages", -1), ("layers.0.n_pages", 9), ("layers.0.projections", []),
    ("layers.0.projections.0.format", "q9"), ("layers.0.projections.0.name", "middle"),
    ("layers.0.projections.0.n_in", 255), ("layers.0.projections.0.rows_per_page", 57),
    ("layers.0.projections.0.n_rows", 1000), ("layers.0.projections.1.first_page", 0),
    ("layers.0.projections.0.offset_bytes", [0, 0, 0, 0, 0]), ("layers.0.projections.0.crc32", [1]),
    ("layers.0.projections.0.crc32", ["a"] * 5), ("layers.0.projections.0.n_bytes", 1.5),
]  # fmt: skip


def test_a_mangled_manifest_gives_one_line(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.rimuru"
    convert_model(model, target)
    path = target / MANIFEST_NAME
    good = path.read_text()
    for place, value in MANGLED:
        document = record = json.loads(good)
        *way, last = place.split(".")
        for step in way:
            record = record[int(step) if step.isdigit() else step]
        record[last] = value
        path.write_text(json.dumps(document))
        with pytest.raises(FileFormatError, match="convert") as caught:
            open_source(target)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), place
    for text in ("", "[1]", "[" * 100_000, "\xff", good[:-1]):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(FileFormatError, match="no manifest of converted experts"):
            open_source(target)
    path.write_text(good)
    (target / BLOB_NAME).unlink()
    with pytest.raises(FileFormatError, match=r"experts\.bin: cannot be opened"):
        open_source(target)
    shutil.rmtree(target)
    with pytest.raises(FileFormatError, match=r"manifest\.json: cannot be read"):
        open_source(target)


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_convert import make_layout
from converters.gguf_to_blobs import convert
from rimuru.formats.gguf import open_gguf
import time
with open_gguf(Path(sys.argv[1])) as gguf:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(1000):
        convert(gguf, make_layout(), Path(sys.argv[2]))
"""


def test_killed_at_any_moment_leaves_all_or_nothing(model: Path, tmp_path: Path) -> None:
    """The child converts over and over until it is killed; the folder is then absent or complete, never half."""
    target = tmp_path / "model.rimuru"
    rng = np.random.default_rng(7)
    root = Path(__file__).resolve().parents[2]
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(model), str(target), str(Path(__file__).parent), str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.stdin.write(b"\n")
        child.stdin.flush()
        time.sleep(float(rng.uniform(0, 0.05)))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert names_in(tmp_path) <= {"model.gguf", "model.rimuru", ".model.rimuru.partial"}
        if target.exists():
            with open_gguf(model) as gguf:
                verify_blob(target, gguf, make_layout())
                open_source(target)[1].close()
    convert_model(model, target, verify=True)
    assert names_in(tmp_path) == {"model.gguf", "model.rimuru"}


def test_one_expert_of_a_closed_file(model: Path) -> None:
    gguf: GgufFile = open_gguf(model)
    gguf.close()
    layout = make_layout()
    with pytest.raises(StoreReadError, match="was closed"):
        read_expert_pages(gguf, layout.layers[0], 0, np.zeros((layout.layers[0].n_pages, PAGE_BYTES), np.uint8))
