"""Compares a finished blob with its GGUF, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rimuru.base.errors import StoreReadError
from rimuru.formats.expert_blob import ExpertBlob, read_expert_pages
from rimuru.formats.gguf import GgufFile

if TYPE_CHECKING:
    from rimuru.memory.specs import ExpertLayout


def verify_blob(
    folder: Path, gguf: GgufFile, layout: ExpertLayout, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read every expert of the folder back, check its checksums and compare its rows with those of the GGUF.

    Memory: two experts. Raises StoreReadError naming block, expert and projection where anything differs;
    progress(bytes done, bytes in all) is called after each expert.
    """
    blob = ExpertBlob(folder)
    try:
        done_bytes = 0
        for slot, layer in enumerate(layout.layers):
            stored = np.empty((layer.n_pages, layout.page_bytes), np.uint8)
            wanted = np.empty_like(stored)
            for expert in range(layer.n_experts):
                blob.read_expert(slot, expert, stored, check=True)
                read_expert_pages(gguf, layer, expert, wanted)
                for projection in layer.projections:
                    pages = slice(projection.first_page, projection.first_page + projection.n_pages)
                    if not np.array_equal(stored[pages], wanted[pages]):
                        raise StoreReadError(
                            f"{folder}: expert {expert} of block {layer.layer}: {projection.name} differs from "
                            f"{projection.tensor}; run `rimuru convert` again"
                        )
                done_bytes += stored.nbytes
                if progress is not None:
                    progress(done_bytes, blob.manifest.n_bytes)
    finally:
        blob.close()
