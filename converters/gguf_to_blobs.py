"""GGUF -> `.rimuru` folder: experts.bin in pool pages, and its manifest. Dense weights stay in the GGUF.

The conversion streams (one expert in memory), checks the free space first, and the folder becomes visible by one
rename. A conversion that was interrupted leaves nothing visible; the next one starts over.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from rimuru.base.errors import BadInputError, FileFormatError
from rimuru.base.units import MIB, human_bytes
from rimuru.formats.expert_blob import BLOB_NAME, projection_crc32, read_expert_pages
from rimuru.formats.gguf import GgufFile
from rimuru.formats.manifest import MANIFEST_NAME, Manifest

from .plan import Checksums, blob_bytes, check_convertible, make_manifest
from .publish import publish, staging_folder
from .verify import verify_blob

if TYPE_CHECKING:
    from rimuru.memory.specs import ExpertLayout

Progress = Callable[[int, int], None]
_MANIFEST_BYTES_BOUND = 4 * MIB


def default_target(gguf: GgufFile) -> Path:
    """`model.rimuru` beside `model.gguf`; for a split set named after its first part without the numbers."""
    first = gguf.parts[0]
    stem = first.stem
    if len(gguf.parts) > 1:
        stem = stem[: -len("-00001-of-00001")]
    return first.with_name(f"{stem}.rimuru")


def convert(
    gguf: GgufFile,
    layout: ExpertLayout,
    out_dir: str | Path,
    progress: Progress | None = None,
    verify: bool = False,
) -> Manifest:
    """Write the experts of `gguf` in `layout` to the folder `out_dir`.

    progress(bytes done, bytes in all) is called after each expert. With `verify` the blob is read back and compared
    with the GGUF before it becomes visible (then twice the bytes are counted). An existing folder of the same source
    is replaced in one step. Raises BadInputError (no experts, no space, cannot write, something else is there),
    FileFormatError (layout of another file), StoreReadError (the GGUF cannot be read, or verification failed).
    """
    target = Path(out_dir).absolute()
    check_convertible(gguf, layout)
    total_bytes = blob_bytes(layout)
    steps = _Steps(progress, total_bytes * (2 if verify else 1))
    try:
        _check_replaceable(gguf, target)
        with staging_folder(target) as staging:
            _check_space(target, total_bytes)
            with open(staging / BLOB_NAME, "wb", buffering=0) as file:
                checksums = _write_experts(gguf, layout, file, steps)
            manifest = make_manifest(gguf, layout, target, checksums)
            manifest.save(staging / MANIFEST_NAME)
            if verify:
                verify_blob(staging, gguf, layout, steps.second_pass)
            publish(staging, target)
    except OSError as error:
        raise BadInputError(f"{target}: cannot be written: {error.strerror}; choose another place with -o") from None
    return manifest


class _Steps:
    """Counts bytes over writing and verifying for one progress bar."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes

    def first_pass(self, done_bytes: int) -> None:
        if self._progress is not None:
            self._progress(done_bytes, self._total_bytes)

    def second_pass(self, done_bytes: int, pass_bytes: int) -> None:
        self.first_pass(pass_bytes + done_bytes)


def _write_experts(gguf: GgufFile, layout: ExpertLayout, file: BinaryIO, steps: _Steps) -> Checksums:
    checksums: Checksums = []
    done_bytes = 0
    for layer in layout.layers:
        pages = np.empty((layer.n_pages, layout.page_bytes), np.uint8)
        crcs: list[list[int]] = [[] for _ in layer.projections]
        for expert in range(layer.n_experts):
            read_expert_pages(gguf, layer, expert, pages)
            for noted, projection in zip(crcs, layer.projections, strict=True):
                noted.append(projection_crc32(projection, pages))
            rest = memoryview(pages.data).cast("B")
            while rest:  # an unbuffered write may take less than it was given
                rest = rest[file.write(rest) :]
            done_bytes += pages.nbytes
            steps.first_pass(done_bytes)
        checksums.append(crcs)
    return checksums


def _check_space(target: Path, total_bytes: int) -> None:
    free_bytes = shutil.disk_usage(target.parent).free
    needed_bytes = total_bytes + _MANIFEST_BYTES_BOUND
    if free_bytes < needed_bytes:
        raise BadInputError(
            f"{target.parent}: the converted experts take {human_bytes(needed_bytes)} ({needed_bytes} bytes), but only "
            f"{human_bytes(free_bytes)} ({free_bytes} bytes) are free; make room or choose another disk with -o"
        )


def _check_replaceable(gguf: GgufFile, target: Path) -> None:
    """Only an absent or empty folder, or a conversion of this very source (damaged or not), may be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    names = {path.name for path in target.iterdir()} if target.is_dir() and not target.is_symlink() else {"?"}
    if not names <= {MANIFEST_NAME, BLOB_NAME}:
        raise BadInputError(f"{target}: something else is there; remove it or choose another folder with -o")
    if MANIFEST_NAME not in names:
        return
    try:
        source = Path(Manifest.load(target / MANIFEST_NAME).source_path)
    except FileFormatError:
        return
    if source.name != gguf.parts[0].name:
        raise BadInputError(f"{target}: holds the experts of {source}; remove it or choose another folder with -o")
