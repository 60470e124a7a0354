"""experts.bin of a `.rimuru` folder, and the shape that an expert has in pages.

    experts.bin:  layer 0: [expert 0][expert 1]...   layer 1: [expert 0]...        (layers with experts, in order)
    expert:       [gate pages][up pages][down pages]                 n_pages * page_bytes, starts on a page boundary
    page:         [row][row]...[row][zeros]                          rows_per_page rows, the last page may hold fewer

An expert's bytes are exactly those of its pages in the pool, so one read brings a whole expert.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from rimuru.base.errors import FileFormatError, StoreReadError
from rimuru.formats.gguf import GgufFile, open_gguf, read_exactly
from rimuru.formats.manifest import MANIFEST_NAME, Manifest, ProjectionEntry

if TYPE_CHECKING:
    from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout, ProjectionLayout

BLOB_NAME = "experts.bin"
_DIRECT_ALIGNMENT = 4096  # of address, offset and length; the largest block size of common disks
_AGAIN = "run `rimuru convert` again"


def page_rows(projection: ProjectionLayout, pages: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The parts of an expert's pages, uint8 [n_pages, page_bytes], that hold the projection's rows, in row order."""
    full_bytes = projection.rows_per_page * projection.row_bytes
    parts = [pages[projection.first_page + page, :full_bytes] for page in range(projection.n_pages)]
    rest_rows = projection.n_rows - (projection.n_pages - 1) * projection.rows_per_page
    parts[-1] = parts[-1][: rest_rows * projection.row_bytes]
    return parts


def read_expert_pages(gguf: GgufFile, layer: ExpertLayerLayout, expert: int, out: NDArray[np.uint8]) -> None:
    """Read one expert's projections from the GGUF into the shape of pool pages.

    out: uint8 [layer.n_pages, page_bytes], contiguous rows; padding is set to zero. Raises StoreReadError.
    """
    for projection in layer.projections:
        read_projection_pages(gguf, projection, expert, out)


def read_projection_pages(gguf: GgufFile, projection: ProjectionLayout, expert: int, out: NDArray[np.uint8]) -> None:
    """One projection of the same, into its pages of `out`."""
    parts = page_rows(projection, out)
    for page, part in enumerate(parts):
        out[projection.first_page + page, part.size :] = 0
    first_row = expert * projection.tensor_rows + projection.tensor_row
    gguf.read_scattered(projection.tensor, first_row * projection.row_bytes, parts)


def projection_crc32(projection: ProjectionLayout, pages: NDArray[np.uint8]) -> int:
    """Checksum of the projection's pages, padding included."""
    return zlib.crc32(pages[projection.first_page : projection.first_page + projection.n_pages].data)


def check_layout(gguf: GgufFile, layout: ExpertLayout) -> None:
    """Raise FileFormatError unless each projection of the layout lies in a tensor of this file, row for row."""
    for layer in layout.layers:
        for projection in layer.projections:
            info = gguf.tensors.get(projection.tensor)
            if info is None:
                raise FileFormatError(f"{gguf.path}: expert tensor {projection.tensor} is missing")
            fits = (
                info.format == projection.format
                and info.n_in == projection.n_in
                and info.row_bytes == projection.row_bytes
                and info.n_rows == layer.n_experts * projection.tensor_rows
                and projection.tensor_row + projection.n_rows <= projection.tensor_rows
            )
            if not fits:
                raise FileFormatError(
                    f"{gguf.path}: tensor {projection.tensor} ({info.format.name}, {list(info.shape)}) does not hold "
                    f"{layer.n_experts} experts of {projection.n_rows} rows of {projection.n_in} "
                    f"{projection.format.name}"
                )


def is_blob_folder(path: Path) -> bool:
    """True for a folder with a manifest in it (which may still be damaged)."""
    return (path / MANIFEST_NAME).is_file()


@final
class ExpertBlob:
    """An open `.rimuru` folder. Reads are positioned, so several threads may read at once.

    `direct`: read past the system's page cache where file system, page size and the array's address allow it. Right
    for a store that keeps its own copies in RAM; without such copies the page cache is what makes a second read fast.
    """

    def __init__(self, folder: Path, direct: bool = False) -> None:
        self.folder = folder
        self.manifest = Manifest.load(folder / MANIFEST_NAME)
        path = folder / BLOB_NAME
        try:
            self._fd: int | None = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be opened: {error.strerror}; {_AGAIN}") from None
        self._direct_fd = _open_direct(path) if direct and self.manifest.page_bytes % _DIRECT_ALIGNMENT == 0 else None
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes != self.manifest.n_bytes:
            self.close()
            raise FileFormatError(
                f"{path}: the file has {size_bytes} bytes instead of {self.manifest.n_bytes}; {_AGAIN}"
            )

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8], check: bool) -> None:
        """One expert into `out`, uint8 [n_pages, page_bytes], contiguous; with `check` its checksums are compared.

        Raises StoreReadError naming block and expert on a short or failed read or a wrong checksum.
        """
        self._read(layer_slot, expert, self.manifest.layers[layer_slot].projections, out, check)

    def read_projection(self, layer_slot: int, expert: int, number: int, out: NDArray[np.uint8], check: bool) -> None:
        """One of the expert's projections, into its pages of `out`; see read_expert."""
        self._read(layer_slot, expert, self.manifest.layers[layer_slot].projections[number : number + 1], out, check)

    def read_past_cache(self) -> bool:
        """From now on, where file system and disk allow it; whether they do."""
        if self._direct_fd is None and self.manifest.page_bytes % _DIRECT_ALIGNMENT == 0:
            self._direct_fd = _open_direct(self.folder / BLOB_NAME)
        return self._direct_fd is not None

    def _read(
        self,
        layer_slot: int,
        expert: int,
        projections: tuple[ProjectionEntry, ...],
        out: NDArray[np.uint8],
        check: bool,
    ) -> None:
        """Projections that lie side by side, with one system call."""
        layer = self.manifest.layers[layer_slot]
        what = f"{self.folder / BLOB_NAME}: expert {expert} of block {layer.layer}"
        if out.shape != (layer.n_pages, self.manifest.page_bytes):
            raise ValueError(f"{what} needs {layer.n_pages} pages of {self.manifest.page_bytes} bytes, got {out.shape}")
        if self._fd is None:
            raise StoreReadError(f"{what} could not be read: the file was closed")
        aligned = self._direct_fd is not None and out.ctypes.data % _DIRECT_ALIGNMENT == 0
        fd = self._direct_fd if self._direct_fd is not None and aligned else self._fd
        first, last = projections[0], projections[-1]
        wanted = out[first.first_page : last.first_page + last.n_pages]
        read_exactly(fd, first.offset_bytes[expert], (wanted,), what)
        if not check:
            return
        for projection in projections:
            pages = out[projection.first_page : projection.first_page + projection.n_pages]
            if zlib.crc32(pages.data) != projection.crc32[expert]:
                raise StoreReadError(f"{what} is damaged: wrong checksum of {projection.name}; {_AGAIN}")

    def open_source(self) -> GgufFile:
        """The GGUF that the blob was made from, with its dense weights and metadata.

        Looked for beside the folder as before, then at its old absolute place. Raises FileFormatError when it is
        missing or has changed since.
        """
        manifest = self.manifest
        found = [p for p in (self.folder / manifest.source_relative, Path(manifest.source_path)) if p.is_file()]
        if not found:
            raise FileFormatError(
                f"{self.folder}: its source {manifest.source_path} is missing; bring it back, or {_AGAIN}"
            )
        for path in found:
            gguf = open_gguf(path)
            if gguf.identity() == manifest.source_identity:
                return gguf
            gguf.close()
        raise FileFormatError(f"{self.folder}: its source {found[0]} has changed since the conversion; {_AGAIN}")

    def close(self) -> None:
        """Close the file; the manifest stays usable."""
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._direct_fd = None


def _open_direct(path: Path) -> int | None:
    """A descriptor that reads past the page cache, or None where there is no such thing."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return None
    with mmap.mmap(-1, _DIRECT_ALIGNMENT) as page:  # some file systems open, and then do not read
        try:
            if os.preadv(fd, [page], 0) == _DIRECT_ALIGNMENT:
                return fd
        except OSError:
            pass
    os.close(fd)
    return None
