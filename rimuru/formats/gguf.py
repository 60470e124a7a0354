"""A GGUF model on disk: one file or a split set, opened from its headers only.

    with open_gguf("model-00002-of-00003.gguf") as gguf:
        n_layers = gguf.kv.require(f"{gguf.architecture}.block_count", int)
        gguf.read_into("output.weight", 0, out)

Layout and checks: gguf_header.py. Typed access to metadata: gguf_values.py. Finding parts: gguf_splits.py.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np
from numpy.typing import NDArray

from rimuru.base.errors import BadInputError, FileFormatError, StoreReadError, UnsupportedModelError
from rimuru.formats.demo import model_path
from rimuru.formats.gguf_header import Header, TensorInfo, parse_header
from rimuru.formats.gguf_splits import find_file, part_paths
from rimuru.formats.gguf_values import KeyValues, StringArray
from rimuru.formats.quants import ENGINE_FORMATS

__all__ = ["GgufFile", "KeyValues", "StringArray", "TensorInfo", "check_formats", "open_gguf", "read_exactly"]

_MAX_BUFFERS = 512  # of one positioned read; systems allow 1024


def open_gguf(path: str | Path) -> GgufFile:
    """Open a .gguf file, any part of a split set, the folder of one model, or the packaged `demo`.

    Reads and checks the headers; no tensor data. Raises BadInputError (no such file), FileFormatError (damaged).
    """
    return GgufFile(model_path(path))


def read_exactly(fd: int, offset_bytes: int, outs: Sequence[NDArray[np.uint8]], what: str) -> None:
    """Fill the arrays `outs` (uint8, each contiguous) one after the other from byte offset_bytes of the open file.

    One system call where the kernel allows it. Raises StoreReadError naming `what` when the file ends too early.
    """
    views = [memoryview(out.data).cast("B") for out in outs if out.nbytes]
    first = 0
    while first < len(views):
        try:
            n_read = os.preadv(fd, views[first : first + _MAX_BUFFERS], offset_bytes)
        except OSError as error:
            raise StoreReadError(f"{what} could not be read: {error.strerror}; check the disk") from error
        if n_read == 0:
            raise StoreReadError(
                f"{what} could not be read: the file ends at byte {offset_bytes}; it was cut off after opening"
            )
        offset_bytes += n_read
        while first < len(views) and n_read >= len(views[first]):
            n_read -= len(views[first])
            first += 1
        if n_read:
            views[first] = views[first][n_read:]


def check_formats(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that the kernels cannot use, before anything is loaded.

    Raises UnsupportedModelError that lists each unsupported type with one tensor that has it, and each type whose
    block does not divide a row.
    """
    problems: dict[str, str] = {}
    for info in tensors.values():
        if info.format not in ENGINE_FORMATS:
            problems.setdefault(info.format.name, f"{info.format.name.upper()} (tensor {info.name})")
        elif info.n_in % info.format.block_elements:
            problems.setdefault(
                f"rows of {info.format.name}",
                f"{info.format.name.upper()} with rows of {info.n_in} elements (tensor {info.name})",
            )
    if problems:
        supported = " ".join(fmt.name.upper() for fmt in ENGINE_FORMATS)
        raise UnsupportedModelError(
            f"tensor types that cannot run: {', '.join(problems.values())}; use a file with {supported}"
        )


@final
class GgufFile:
    """An open model. Reads are thread-safe (positioned reads, no shared file position).

    path     as given            parts    files in split order
    kv       metadata of part 0  tensors  name -> TensorInfo, in file order over all parts
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: list[Path] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._fds: list[int] = []
        self._sizes_bytes: list[int] = []
        self._mtimes_ns: list[int] = []
        self._headers: list[Header] = []
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        try:
            self._open_all()
        except BaseException:
            self._forget_files()
            raise
        self.version = self._headers[0].version

    def _open_all(self) -> None:
        first = find_file(self.path)
        self._open_part(first)
        split = KeyValues(first, self._headers[0].data, self._headers[0].entries)
        count = split.get("split.count", int, 1)
        if count > 1:
            number = split.require("split.no", int)
            self._forget_files()  # the named part is opened again in its turn: part numbers are list positions
            for part in part_paths(first, number, count):
                self._open_part(part)
        self.kv = KeyValues(self.parts[0], self._headers[0].data, self._headers[0].entries)
        for part, header in zip(self.parts, self._headers, strict=True):
            for info in header.tensors:
                if info.name in self.tensors:
                    raise FileFormatError(f"{part}: tensor {info.name} is also in another part of the model")
                self.tensors[info.name] = info
        if count > 1:
            self._check_split_keys(count)

    def _open_part(self, part: Path) -> None:
        try:
            fd = os.open(part, os.O_RDONLY)
        except OSError as error:
            raise BadInputError(f"{part}: cannot be opened: {error.strerror}") from None
        self._fds.append(fd)
        status = os.fstat(fd)
        self.parts.append(part)
        self._sizes_bytes.append(status.st_size)
        self._mtimes_ns.append(status.st_mtime_ns)
        self._headers.append(parse_header(part, fd, status.st_size, len(self.parts) - 1))

    def _check_split_keys(self, count: int) -> None:
        for index, (part, header) in enumerate(zip(self.parts, self._headers, strict=True)):
            kv = KeyValues(part, header.data, header.entries)
            for key, right in (("split.no", index), ("split.count", count), ("split.tensors.count", len(self.tensors))):
                found = kv.require(key, int)
                if found != right:
                    raise FileFormatError(f"{part}: key {key} is {found}, but the set of parts says {right}")

    @property
    def architecture(self) -> str:
        """The value of general.architecture. Raises FileFormatError where it is missing."""
        return self.kv.require("general.architecture", str)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as a read-only view [n_bytes] of a mapped file. KeyError for an unknown name.

        For tools and tests: a file that is cut off while it is mapped ends the process. Loading uses read_into.
        """
        info = self.tensors[name]
        if not info.n_bytes:
            return np.zeros(0, np.uint8)
        with self._lock:
            mapped = self._maps.get(info.part)
            if mapped is None:
                mapped = np.memmap(self.parts[info.part], np.uint8, mode="r")
                self._maps[info.part] = mapped
        if info.offset_bytes + info.n_bytes > mapped.size:
            raise StoreReadError(f"{self.parts[info.part]}: tensor {name}: the file was cut off after opening")
        return mapped[info.offset_bytes : info.offset_bytes + info.n_bytes]

    def read_into(self, name: str, offset_bytes: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (uint8, contiguous) with the tensor's bytes from offset_bytes on.

        Raises KeyError (unknown name), ValueError (past the tensor's end), StoreReadError (short or failed read).
        """
        self.read_scattered(name, offset_bytes, (out,))

    def read_scattered(self, name: str, offset_bytes: int, outs: Sequence[NDArray[np.uint8]]) -> None:
        """Like read_into, with consecutive bytes going to several arrays in turn: rows into the pages of a layout."""
        info = self.tensors[name]
        end_bytes = offset_bytes + sum(out.nbytes for out in outs)
        if offset_bytes < 0 or end_bytes > info.n_bytes:
            raise ValueError(f"bytes {offset_bytes} to {end_bytes} are outside tensor {name} of {info.n_bytes} bytes")
        what = f"{self.parts[info.part]}: tensor {name}"
        if not self._fds:
            raise StoreReadError(f"{what} could not be read: the file was closed")
        read_exactly(self._fds[info.part], info.offset_bytes + offset_bytes, outs, what)

    def identity(self) -> dict[str, object]:
        """What tells this model from a changed one: per part name, bytes, time of change and header's SHA-256."""
        return {
            "parts": [
                {
                    "name": part.name,
                    "n_bytes": size_bytes,
                    "mtime_ns": mtime_ns,
                    "header_sha256": hashlib.sha256(header.data).hexdigest(),
                }
                for part, size_bytes, mtime_ns, header in zip(
                    self.parts, self._sizes_bytes, self._mtimes_ns, self._headers, strict=True
                )
            ]
        }

    def close(self) -> None:
        """Close the files. Metadata, directory and identity stay usable; reading raises StoreReadError."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._maps.clear()

    def _forget_files(self) -> None:
        self.close()
        for items in (self.parts, self._sizes_bytes, self._mtimes_ns, self._headers):
            items.clear()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
