"""Where experts are read from when they are not in memory: the GGUF itself, or a converted blob.

Both give an expert in the shape of its pool pages, so that nothing above knows which one serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rimuru.formats.expert_blob import ExpertBlob, check_layout, is_blob_folder, read_expert_pages
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

    def close(self) -> None:
        """Release what the source itself has opened."""


class GgufExpertSource:
    """Experts straight from the GGUF: one positioned read per projection, spread over its pages.

    The file belongs to the caller. Raises FileFormatError when the layout is not one of this file.
    """

    def __init__(self, gguf: GgufFile, layout: ExpertLayout) -> None:
        check_layout(gguf, layout)
        self.layout = layout
        self._gguf = gguf

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8]) -> None:
        """See ExpertSource."""
        layer = self.layout.layers[layer_slot]
        if out.shape != (layer.n_pages, self.layout.page_bytes) or not 0 <= expert < layer.n_experts:
            raise ValueError(f"expert {expert} of block {layer.layer} does not go into an array of shape {out.shape}")
        read_expert_pages(self._gguf, layer, expert, out)

    def expert_bytes(self, layer_slot: int) -> int:
        """See ExpertSource."""
        return self.layout.layers[layer_slot].n_pages * self.layout.page_bytes

    def close(self) -> None:
        """Nothing of its own is open."""


class BlobExpertSource:
    """Experts from a `.rimuru` folder: one read each. Checksums are compared when an expert is read the first time."""

    def __init__(self, blob: ExpertBlob) -> None:
        self.layout = layout_of(blob.manifest)
        self._blob = blob
        # One flag per expert. Two threads that read the same expert first may both check it, which does no harm.
        self._checked = [np.zeros(layer.n_experts, np.bool_) for layer in self.layout.layers]

    def read_expert(self, layer_slot: int, expert: int, out: NDArray[np.uint8]) -> None:
        """See ExpertSource."""
        checked = self._checked[layer_slot]
        if not 0 <= expert < checked.size:
            raise ValueError(f"layer slot {layer_slot} has experts 0 to {checked.size - 1}, not {expert}")
        self._blob.read_expert(layer_slot, expert, out, check=not checked[expert])
        checked[expert] = True

    def expert_bytes(self, layer_slot: int) -> int:
        """See ExpertSource."""
        return self.layout.layers[layer_slot].n_pages * self.layout.page_bytes

    def close(self) -> None:
        """Close the blob."""
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
