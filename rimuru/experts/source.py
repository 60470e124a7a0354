"""Where experts are read from when they are not in memory: the GGUF itself, or a converted blob.

Both give an expert in the shape of its pool pages, so that nothing above knows which one serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rimuru.formats.expert_blob import (
    ExpertBlob,
    check_layout,
    is_blob_folder,
    read_expert_pages,
    read_projection_pages,
)
from rimuru.formats.gguf import GgufFile, open_gguf
from rimuru.formats.manifest import Manifest
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout, ProjectionLayout, ProjectionName


class ExpertSource(Protocol):
    """Reads single experts; read_expert may be called from several threads at once."""

    @property
    def layout(self) -> ExpertLayout:
        """How experts lie in pages."""

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Fill out, uint8 [n_pages, page_bytes] of the layer slot, contiguous. Raises StoreReadError."""

    def expert_bytes(self, layer_slot: int) -> int:
        """Bytes that one expert of the layer slot takes in pages."""

    def read_for_steps(self, n_threads: int) -> None:
        """From now on steps wait for reads, and who reads keeps copies: an expert's projections are read side by side
        where no more than n_threads are at it, and past the system's page cache where that can be."""

    def close(self) -> None:
        """Release what the source itself has opened."""


class _SideBySide:
    """Reads the projections of an expert on several threads: a disk, and memory, give one reader a part of their rate.
    Where many experts are read at once that is so anyway, and each is read by its own thread alone."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._most_experts = self._n_reading = 0
        self._lock = threading.Lock()

    def start(self, n_threads: int) -> None:
        if self._executor is None and n_threads > 1:
            self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix="rimuru-read-part")
            self._most_experts = max(1, n_threads // 3)

    def read(self, whole: Callable[[], None], parts: Callable[[int], None], n_parts: int) -> None:
        """parts(0) to parts(n_parts - 1), or whole(). Raises the first error when nothing is being read any more."""
        with self._lock:
            self._n_reading += 1
            executor = self._executor if self._n_reading <= self._most_experts else None
        try:
            if executor is None:
                whole()
                return
            futures = [executor.submit(parts, number) for number in range(1, n_parts)]
            try:
                parts(0)
            finally:
                wait(futures)
            for future in futures:
                future.result()
        finally:
            with self._lock:
                self._n_reading -= 1

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)


class GgufExpertSource:
    """Experts straight from the GGUF: one positioned read per projection, spread over its pages.

    The file belongs to the caller. Raises FileFormatError when the layout is not one of this file.
    """

    def __init__(self, gguf: GgufFile, layout: ExpertLayout) -> None:
        check_layout(gguf, layout)
        self.layout = layout
        self._gguf, self._reads = gguf, _SideBySide()

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8]) -> None:
        """See ExpertSource."""
        layer = self.layout.layers[layer_slot]
        if out.shape != (layer.n_pages, self.layout.page_bytes) or not 0 <= expert < layer.n_experts:
            raise ValueError(f"expert {expert} of block {layer.layer} does not go into an array of shape {out.shape}")

        def read_part(number: int) -> None:
            read_projection_pages(self._gguf, layer.projections[number], expert, out)

        self._reads.read(lambda: read_expert_pages(self._gguf, layer, expert, out), read_part, len(layer.projections))

    def read_for_steps(self, n_threads: int) -> None:
        """See ExpertSource. A GGUF's rows do not begin where direct reads may."""
        self._reads.start(n_threads)

    def expert_bytes(self, layer_slot: int) -> int:
        """See ExpertSource."""
        return self.layout.layers[layer_slot].n_pages * self.layout.page_bytes

    def close(self) -> None:
        """The file stays open."""
        self._reads.close()


class BlobExpertSource:
    """Experts from a `.rimuru` folder: one read each. Checksums are compared when an expert is read the first time."""

    def __init__(self, blob: ExpertBlob) -> None:
        self.layout = layout_of(blob.manifest)
        self._blob, self._reads = blob, _SideBySide()
        # One flag per expert. Two threads that read the same expert first may both check it, which does no harm.
        self.is_direct = False
        """Whether the system's page cache is passed by."""
        self._checked = [np.zeros(layer.n_experts, np.bool_) for layer in self.layout.layers]

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8]) -> None:
        """See ExpertSource."""
        checked = self._checked[layer_slot]
        if not 0 <= expert < checked.size:
            raise ValueError(f"layer slot {layer_slot} has experts 0 to {checked.size - 1}, not {expert}")
        check = not checked[expert]
        self._reads.read(
            lambda: self._blob.read_expert(layer_slot, expert, out, check),
            lambda number: self._blob.read_projection(layer_slot, expert, number, out, check),
            len(self.layout.layers[layer_slot].projections),
        )
        checked[expert] = True

    def read_for_steps(self, n_threads: int) -> None:
        """See ExpertSource."""
        self._reads.start(n_threads)
        self.is_direct = self._blob.read_past_cache()

    def expert_bytes(self, layer_slot: int) -> int:
        """See ExpertSource."""
        return self.layout.layers[layer_slot].n_pages * self.layout.page_bytes

    def close(self) -> None:
        """Close the blob."""
        self._reads.close()
        self._blob.close()


def open_source(path: str | Path, direct: bool = False) -> tuple[GgufFile, BlobExpertSource]:
    """Open a `.rimuru` folder: its GGUF (metadata, dense weights) and its experts. The caller closes both.

    `direct` reads past the page cache (see ExpertBlob).

    Raises FileFormatError for a damaged folder, a missing source, or one that has changed since the conversion.
    """
    blob = ExpertBlob(Path(path), direct)
    try:
        return blob.open_source(), BlobExpertSource(blob)
    except BaseException:
        blob.close()
        raise


def layout_of(manifest: Manifest) -> ExpertLayout:
    """The layout that the blob was written in."""
    names: dict[str, ProjectionName] = {"gate": "gate", "up": "up", "down": "down"}
    layers = []
    for layer in manifest.layers:
        projections = tuple(
            ProjectionLayout(
                name=names[entry.name],
                tensor=entry.tensor,
                tensor_row=entry.tensor_row,
                tensor_rows=entry.tensor_rows,
                n_rows=entry.n_rows,
                n_in=entry.n_in,
                row_bytes=entry.row_bytes,
                format=entry.quant_format,
                rows_per_page=entry.rows_per_page,
                n_pages=entry.n_pages,
                first_page=entry.first_page,
            )
            for entry in layer.projections
        )
        layers.append(ExpertLayerLayout(layer.layer, layer.n_experts, layer.n_pages, projections))
    return ExpertLayout(manifest.page_bytes, tuple(layers))


def open_model(path: Path) -> tuple[GgufFile, ExpertSource | None]:
    """The GGUF of a model path and, for a `.rimuru` folder, the source of its converted experts."""
    if is_blob_folder(path):
        return open_source(path)
    return open_gguf(path), None
