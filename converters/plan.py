"""What a conversion will write: sizes and places of all experts, known before the first byte is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rimuru.base.errors import BadInputError
from rimuru.formats.expert_blob import check_layout
from rimuru.formats.gguf import GgufFile
from rimuru.formats.manifest import LayerEntry, Manifest, ProjectionEntry

if TYPE_CHECKING:
    from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout

Checksums = list[list[list[int]]]
"""[layer slot][projection][expert] -> CRC-32 of the projection's pages."""


def blob_bytes(layout: ExpertLayout) -> int:
    """Size of experts.bin."""
    return sum(layer.n_experts * layer.n_pages * layout.page_bytes for layer in layout.layers)


def check_convertible(gguf: GgufFile, layout: ExpertLayout) -> None:
    """Raise BadInputError for a model without experts, FileFormatError for a layout that is not this file's."""
    if not layout.layers:
        raise BadInputError(f"{gguf.path}: this model has no experts, so there is nothing to convert; run it as it is")
    check_layout(gguf, layout)


def make_manifest(gguf: GgufFile, layout: ExpertLayout, target: Path, checksums: Checksums) -> Manifest:
    """The index of a finished experts.bin that will lie in the folder `target`."""
    layers: list[LayerEntry] = []
    start_bytes = 0
    for layer, crcs in zip(layout.layers, checksums, strict=True):
        layers.append(_layer_entry(layer, layout.page_bytes, start_bytes, crcs))
        start_bytes += layer.n_experts * layer.n_pages * layout.page_bytes
    source = gguf.parts[0].absolute()
    return Manifest(
        source_path=str(source),
        source_relative=os.path.relpath(source, target.absolute()),
        source_identity=gguf.identity(),
        architecture=gguf.architecture,
        page_bytes=layout.page_bytes,
        n_bytes=start_bytes,
        layers=tuple(layers),
    )


def _layer_entry(layer: ExpertLayerLayout, page_bytes: int, start_bytes: int, crcs: list[list[int]]) -> LayerEntry:
    expert_bytes = layer.n_pages * page_bytes
    entries = tuple(
        ProjectionEntry(
            name=projection.name,
            tensor=projection.tensor,
            tensor_row=projection.tensor_row,
            tensor_rows=projection.tensor_rows,
            n_rows=projection.n_rows,
            n_in=projection.n_in,
            row_bytes=projection.row_bytes,
            format=projection.format.name,
            rows_per_page=projection.rows_per_page,
            n_pages=projection.n_pages,
            first_page=projection.first_page,
            n_bytes=projection.n_rows * projection.row_bytes,
            offset_bytes=tuple(
                start_bytes + expert * expert_bytes + projection.first_page * page_bytes
                for expert in range(layer.n_experts)
            ),
            crc32=tuple(crc),
        )
        for projection, crc in zip(layer.projections, crcs, strict=True)
    )
    return LayerEntry(layer.layer, layer.n_experts, layer.n_pages, entries)
