"""Reading sound GGUF files: metadata, directory, data, split sets, identity."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from rimuru.base.errors import BadInputError, FileFormatError, StoreReadError, UnsupportedModelError
from rimuru.formats.gguf import KeyValues, StringArray, TensorInfo, check_formats, open_gguf
from rimuru.formats.quants import BY_NAME
from rimuru.formats.writer import KeyValue, TensorData, write_gguf

SCALARS: list[KeyValue] = [
    ("general.architecture", "str", "qwen3moe"),
    ("n.u8", "u8", 200), ("n.i8", "i8", -3), ("n.u16", "u16", 60000), ("n.i16", "i16", -300),
    ("n.u32", "u32", 4_000_000_000), ("n.i32", "i32", -5), ("n.u64", "u64", 1 << 63), ("n.i64", "i64", -(1 << 40)),
    ("x.f32", "f32", 0.5), ("x.f64", "f64", 1e-300), ("flag", "bool", True), ("text", "str", "grüße 鬱"),
    ("x.nan", "f32", float("nan")), ("x.inf", "f64", float("inf")), ("bad.text", "str", b"a\xffb"),
]  # fmt: skip
ARRAYS: list[KeyValue] = [
    ("a.i32", "arr", ("i32", [3, -1, 2])), ("a.u8", "arr", ("u8", [1, 0, 1])), ("a.u64", "arr", ("u64", [7])),
    ("a.f32", "arr", ("f32", [0.5, 1.5])), ("a.nan", "arr", ("f32", [0.5, float("nan")])),
    ("a.bool", "arr", ("bool", [True, False, True])), ("a.none", "arr", ("str", [])),
    ("a.str", "arr", ("str", ["", "b", "grüße", b"\xff"])),
]  # fmt: skip


def some_tensors(seed: int = 0) -> list[TensorData]:
    """Tensors of several formats and odd sizes, random bytes."""
    rng = np.random.default_rng(seed)
    shapes = [("a.weight", (64, 3), "q4_0"), ("b.weight", (7,), "f32"), ("c.weight", (256, 2, 3), "q6_k")]
    out: list[TensorData] = []
    for name, shape, fmt_name in [*shapes, ("d.weight", (33, 1, 1, 2), "f16"), ("empty", (0, 4), "f32")]:
        fmt = BY_NAME[fmt_name]
        n_bytes = fmt.row_bytes(shape[0]) * int(np.prod(shape[1:]))
        out.append((name, shape, fmt, rng.integers(0, 256, n_bytes, dtype=np.uint8)))
    return out


def split_set(folder: Path, kv: list[KeyValue] | None = None, n_parts: int = 3, name: str = "model") -> list[Path]:
    """A split set whose first part has no tensors."""
    tensors = some_tensors()
    shares: list[list[TensorData]] = [[], tensors[:2], tensors[2:]] if n_parts == 3 else [tensors]
    paths = []
    for index, share in enumerate(shares):
        keys: list[KeyValue] = [
            ("split.no", "u16", index), ("split.count", "u16", n_parts), ("split.tensors.count", "i32", len(tensors)),
        ]  # fmt: skip
        paths.append(folder / f"{name}-{index + 1:05d}-of-{n_parts:05d}.gguf")
        write_gguf(paths[-1], ((kv or SCALARS) if index == 0 else []) + keys, share, alignment=32 << index)
    return paths


@pytest.fixture
def kv(tmp_path: Path) -> KeyValues:
    write_gguf(tmp_path / "m.gguf", SCALARS + ARRAYS, [])
    with open_gguf(tmp_path / "m.gguf") as opened:
        return opened.kv


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 16, 32, 64, 4096])
def test_tensors_come_back(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    tensors = some_tensors()
    write_gguf(path, SCALARS, tensors, version, alignment)
    with open_gguf(path) as opened:
        assert (opened.version, opened.path, opened.parts) == (version, path, [path])
        assert opened.architecture == "qwen3moe"
        assert list(opened.tensors) == [name for name, _, _, _ in tensors]
        for name, shape, fmt, raw in tensors:
            info = opened.tensors[name]
            assert (info.shape, info.format, info.part, info.n_bytes) == (shape, fmt, 0, raw.size)
            np.testing.assert_array_equal(opened.raw(name), raw)
            out = np.zeros(max(0, raw.size - 5), np.uint8)
            opened.read_into(name, raw.size - out.size, out)
            np.testing.assert_array_equal(out, raw[raw.size - out.size :])
        assert not opened.raw("a.weight").flags.writeable


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        SCALARS[:13] + [entry for entry in ARRAYS if entry[0] not in ("a.nan", "a.str")],
        some_tensors()[:4],
        alignment=64,
    )
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as opened:
        for tensor in reader.tensors:
            info = opened.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape)
            assert (info.offset_bytes, info.n_bytes) == (tensor.data_offset, tensor.n_bytes)
            assert (info.n_elements, info.format.ggml_id) == (tensor.n_elements, tensor.tensor_type)
        for key in opened.kv:
            wanted = reader.fields[key].contents()
            found = opened.kv[key]
            assert (list(found) if isinstance(found, (np.ndarray, StringArray)) else found) == wanted, key


def test_files_of_the_gguf_package_open(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(4)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "m.gguf") as opened:
        assert opened.kv.require("llama.block_count", int) == 4
        assert list(opened.kv.require_list("tokenizer.ggml.tokens", str)) == ["a", "b"]
        assert opened.tensors["w"].shape == (4, 3)
        np.testing.assert_array_equal(opened.raw("w").view(np.float32), np.arange(12))


def test_tensor_info_counts() -> None:
    info = TensorInfo("w", (64, 3, 5), BY_NAME["q8_0"], 0, 0, 15 * 68)
    assert (info.n_in, info.n_rows, info.row_bytes, info.n_elements) == (64, 15, 68, 960)
    empty = TensorInfo("e", (0, 4), BY_NAME["f32"], 0, 0, 0)
    assert (empty.n_rows, empty.n_elements, empty.row_bytes) == (0, 0, 0)


def test_scalars_of_every_type(kv: KeyValues) -> None:
    for key, type_name, value in SCALARS[:13]:
        assert kv[key] == value and kv.type_name(key) == type_name
    assert kv.require("n.u8", int) == 200 and kv.get("n.i64", int) == -(1 << 40)
    assert kv.require("n.i32", float) == -5.0 and isinstance(kv.require("n.i32", float), float)
    assert kv.require("x.f64", float) == 1e-300
    assert kv.get("absent", int) is None and kv.get("absent", int, 7) == 7 and kv.get("flag") is True
    assert kv["bad.text"] == "a\ufffdb"


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("absent", int, ["absent", "is missing"]),
        ("x.f32", int, ["x.f32", "int", "f32"]),
        ("flag", int, ["flag", "int", "bool"]),
        ("n.u8", bool, ["n.u8", "bool", "u8"]),
        ("text", float, ["text", "float", "str"]),
        ("a.i32", int, ["a.i32", "int", "arr[i32]"]),
        ("a.str", str, ["a.str", "arr[str]"]),
        ("x.nan", float, ["x.nan", "nan", "no finite number"]),
        ("x.inf", float, ["x.inf", "inf", "no finite number"]),
    ],
)
def test_wrong_scalars_name_key_types_and_file(kv: KeyValues, key: str, kind: type, words: list[str]) -> None:
    with pytest.raises(FileFormatError) as caught:
        kv.require(key, kind)
    for word in [*words, "m.gguf"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arrays(kv: KeyValues) -> None:
    assert kv.require_list("a.i32", int) == [3, -1, 2] and kv.require_list("a.u64", int) == [7]
    assert kv.require_list("a.f32", float) == [0.5, 1.5] and kv.require_list("a.i32", float) == [3.0, -1.0, 2.0]
    assert kv.require_list("a.bool", bool) == [True, False, True] and kv.require_list("a.u8", bool) == [
        True,
        False,
        True,
    ]
    texts = kv.require_list("a.str", str)
    assert list(texts) == ["", "b", "grüße", "\ufffd"] and len(texts) == 4
    assert (texts[1], texts[-2], texts[1:3]) == ("b", "grüße", ["b", "grüße"])
    assert texts.raw(3) == b"\xff"  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        texts[4]
    assert len(kv.require_list("a.none", str)) == 0 and list(kv.require_list("a.none", str)) == []
    assert kv.get_list("absent", int) is None and kv.get_list("absent", int, [1]) == [1]
    assert not kv["a.i32"].flags.writeable  # type: ignore[attr-defined]
    for key, kind in [("a.str", int), ("a.f32", int), ("a.i32", bool), ("a.i32", str), ("n.u8", int), ("a.nan", float)]:
        with pytest.raises(FileFormatError, match=key):
            kv.require_list(key, kind)
    with pytest.raises(FileFormatError, match=r"absent.*missing"):
        kv.require_list("absent", str)


def test_per_layer_values_broadcast_or_fit(kv: KeyValues) -> None:
    assert kv.per_layer("n.u8", int, 3) == (200, 200, 200)
    assert kv.per_layer("a.i32", int, 3) == (3, -1, 2)
    assert kv.per_layer("a.u8", int, 3) == (1, 0, 1) and kv.per_layer("a.u8", bool, 3) == (True, False, True)
    assert kv.per_layer("text", str, 2) == ("grüße 鬱",) * 2
    assert kv.per_layer("absent", int, 2, 5) == (5, 5) and kv.per_layer("absent", int, 2, [1, 2]) == (1, 2)
    for n_layers in (2, 4):
        with pytest.raises(FileFormatError, match=rf"a\.i32 has 3 entries, but the model has {n_layers} layers"):
            kv.per_layer("a.i32", int, n_layers)
    with pytest.raises(FileFormatError, match=r"a\.u64 has 1 entries"):
        kv.per_layer("a.u64", int, 2)
    with pytest.raises(FileFormatError, match="missing"):
        kv.per_layer("absent", int, 2)


def test_expect_refuses_other_values(kv: KeyValues) -> None:
    assert kv.expect("n.u8", int, (1, 200)) == 200 and kv.expect("absent", int, (1, 2), default=2) == 2
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf.*n\.u8 is 200.*1, 2"):
        kv.expect("n.u8", int, (1, 2))
    with pytest.raises(FileFormatError, match="missing"):
        kv.expect("absent", int, (1,))


@pytest.mark.parametrize("which", ["1", "2", "3", "folder"])
def test_a_split_set_opens_by_any_part_and_by_its_folder(tmp_path: Path, which: str) -> None:
    paths = split_set(tmp_path)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"another model")
    path = tmp_path if which == "folder" else paths[int(which) - 1]
    with open_gguf(path) as opened:
        assert opened.parts == paths and opened.architecture == "qwen3moe"
        for name, _, _, raw in some_tensors():
            np.testing.assert_array_equal(opened.raw(name), raw)
            out = np.zeros(raw.size, np.uint8)
            opened.read_into(name, 0, out)
            np.testing.assert_array_equal(out, raw)
        assert [info.part for info in opened.tensors.values()] == [1, 1, 2, 2, 2]
        parts = opened.identity()["parts"]
        assert isinstance(parts, list) and [part["name"] for part in parts] == [part.name for part in paths]


def test_split_faults_are_named(tmp_path: Path) -> None:
    def fresh() -> list[Path]:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        (tmp_path / "s").mkdir()
        return split_set(tmp_path / "s")

    paths = fresh()
    paths[1].unlink()
    with pytest.raises(FileFormatError, match=r"part 2 of 3 is missing: model-00002-of-00003\.gguf"):
        open_gguf(paths[0])
    paths = fresh()
    with pytest.raises(FileFormatError, match="its name must be <name>-00001-of-00003"):
        open_gguf(paths[0].rename(tmp_path / "other.gguf"))
    paths = fresh()
    shutil.copy(paths[1], paths[2])
    with pytest.raises(FileFormatError, match=r"tensor a\.weight is also in another part"):
        open_gguf(paths[0])
    paths = fresh()
    write_gguf(
        paths[2],
        [("split.no", "u16", 1), ("split.count", "u16", 3), ("split.tensors.count", "i32", 5)],
        some_tensors()[2:],
    )
    with pytest.raises(FileFormatError, match=r"00003-of-00003.*split\.no is 1.*says 2"):
        open_gguf(paths[0])
    paths = fresh()
    write_gguf(
        paths[2],
        [("split.no", "u16", 2), ("split.count", "u16", 3), ("split.tensors.count", "i32", 5)],
        some_tensors()[2:4],
    )
    with pytest.raises(FileFormatError, match=r"split\.tensors\.count is 5.*says 4"):
        open_gguf(paths[0])
    paths = fresh()
    write_gguf(paths[2], [], some_tensors()[2:])
    with pytest.raises(FileFormatError, match=r"split\.no is missing"):
        open_gguf(paths[0])
    paths = fresh()
    with open(paths[2], "r+b") as file:
        file.truncate(paths[2].stat().st_size - 200)
    with pytest.raises(FileFormatError, match=r"00003-of-00003.*cut off"):
        open_gguf(tmp_path / "s")


def test_a_set_of_one_part_is_a_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "any-name-00007-of-00009.gguf"
    write_gguf(path, [*SCALARS, ("split.count", "u16", 1), ("split.no", "u16", 0)], some_tensors())
    with open_gguf(path) as opened:
        assert opened.parts == [path] and len(opened.tensors) == 5


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(BadInputError, match="holds no GGUF"):
        open_gguf(tmp_path)
    write_gguf(tmp_path / "one.gguf", SCALARS, [])
    with open_gguf(tmp_path) as opened:
        assert opened.parts == [tmp_path / "one.gguf"] and opened.tensors == {}
    write_gguf(tmp_path / "two.gguf", SCALARS, [])
    with pytest.raises(BadInputError, match=r"holds 2 models \(one\.gguf, two\.gguf"):
        open_gguf(tmp_path)


def test_architecture_is_needed_only_when_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", [], some_tensors())
    with (
        open_gguf(tmp_path / "m.gguf") as opened,
        pytest.raises(FileFormatError, match=r"general\.architecture is missing"),
    ):
        opened.architecture  # noqa: B018


def test_identity_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def identity() -> dict[str, object]:
        with open_gguf(path) as opened:
            return opened.identity()

    write_gguf(path, SCALARS, some_tensors())
    first = identity()
    assert identity() == first
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 1
    path.write_bytes(raw)
    assert identity() != first
    write_gguf(path, [*SCALARS, ("more", "u8", 1)], some_tensors())
    assert identity()["parts"][0]["header_sha256"] != first["parts"][0]["header_sha256"]  # type: ignore[index]


def test_reads_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SCALARS, some_tensors())
    with open_gguf(tmp_path / "m.gguf") as opened:
        for offset_bytes, n_bytes in [(-1, 4), (0, 109), (108, 1), (1 << 70, 0)]:
            with pytest.raises(ValueError, match="outside tensor"):
                opened.read_into("a.weight", offset_bytes, np.zeros(n_bytes, np.uint8))
        with pytest.raises(KeyError):
            opened.read_into("absent", 0, np.zeros(1, np.uint8))
    with pytest.raises(StoreReadError, match="was closed"):
        opened.read_into("a.weight", 0, np.zeros(1, np.uint8))


def test_a_file_cut_off_after_opening_gives_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, SCALARS + ARRAYS, some_tensors())
    with open_gguf(path) as opened:
        info = opened.tensors["c.weight"]
        with open(path, "r+b") as file:
            file.truncate(info.offset_bytes + 10)
        out = np.zeros(info.n_bytes, np.uint8)
        with pytest.raises(StoreReadError, match=r"c\.weight.*cut off after opening"):
            opened.read_into("c.weight", 0, out)
        with pytest.raises(StoreReadError, match="cut off after opening"):
            opened.raw("c.weight")
        assert list(opened.kv.require_list("a.str", str))[1] == "b"  # metadata does not depend on the file any more


def test_reads_from_many_threads(tmp_path: Path) -> None:
    raw = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", SCALARS, [("w", (1 << 18,), BY_NAME["f32"], raw)])
    with open_gguf(tmp_path / "m.gguf") as opened, ThreadPoolExecutor(8) as pool:

        def read(seed: int) -> bool:
            start = int(np.random.default_rng(seed).integers(0, raw.size - 5000))
            out = np.zeros(5000, np.uint8)
            opened.read_into("w", start, out)
            return bool((out == raw[start : start + 5000]).all())

        assert all(pool.map(read, range(300)))


def test_unusable_formats_are_all_listed() -> None:
    def info(name: str, fmt: str, n_in: int = 256) -> TensorInfo:
        return TensorInfo(name, (n_in, 2), BY_NAME[fmt], 0, 0, 0)

    sound = {"a": info("a", "q4_k"), "b": info("b", "mxfp4", 32), "c": info("c", "f32", 7)}
    check_formats(sound)
    bad = sound | {
        "x": info("x", "i8"),
        "y": info("y", "i8"),
        "z": info("z", "q8_k"),
        "w": info("w", "q6_k", 320),
    }
    with pytest.raises(UnsupportedModelError) as caught:
        check_formats(bad)
    for words in ("I8 (tensor x)", "Q8_K (tensor z)", "Q6_K with rows of 320 elements (tensor w)"):
        assert words in str(caught.value)
    assert "tensor y" not in str(caught.value)
