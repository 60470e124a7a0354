"""manifest.json of a `.rimuru` folder: what experts.bin holds, where, and from which model it was made.

    {"format": "rimuru-experts", "version": 1,
     "source": {"path": absolute, "relative": from the folder, "identity": GgufFile.identity()},
     "architecture": ..., "page_bytes": P_e, "n_bytes": size of experts.bin,
     "layers": [{"layer": block index, "n_experts": ..., "n_pages": pages of an expert,
                 "projections": [{"name": "gate", "tensor": ..., "tensor_row": ..., "tensor_rows": ..., "n_rows": ...,
                                  "n_in": ..., "row_bytes": ..., "format": "q4_k", "rows_per_page": ...,
                                  "n_pages": ..., "first_page": ..., "n_bytes": rows without padding,
                                  "offset_bytes": [one per expert], "crc32": [one per expert]}, ...]}, ...]}

offset_bytes is absolute in experts.bin; crc32 covers the projection's pages with their padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rimuru.base.errors import FileFormatError
from rimuru.base.units import MIB, ceil_div
from rimuru.formats.quants import BY_NAME, QuantFormat

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "rimuru-experts"
FORMAT_VERSION = 1
_MAX_MANIFEST_BYTES = 256 * MIB
_PROJECTION_NAMES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ProjectionEntry:
    """One projection of all experts of a layer. The layout's fields mean what they mean in memory/specs.py."""

    name: str
    tensor: str
    tensor_row: int
    tensor_rows: int
    n_rows: int
    n_in: int
    row_bytes: int
    format: str
    rows_per_page: int
    n_pages: int
    first_page: int
    n_bytes: int
    offset_bytes: tuple[int, ...]
    crc32: tuple[int, ...]

    @property
    def quant_format(self) -> QuantFormat:
        """The tensor type as an entry of the table."""
        return BY_NAME[self.format]


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """The experts of one block."""

    layer: int
    n_experts: int
    n_pages: int
    projections: tuple[ProjectionEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole index. Made by `converters/`, read by expert_blob.py; `load` has checked every number."""

    source_path: str
    source_relative: str
    source_identity: Mapping[str, object]
    architecture: str
    page_bytes: int
    n_bytes: int
    layers: tuple[LayerEntry, ...]

    def save(self, path: Path) -> None:
        """Write the file `path`; the caller makes it durable."""
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "source": {
                "path": self.source_path,
                "relative": self.source_relative,
                "identity": self.source_identity,
            },
            "architecture": self.architecture,
            "page_bytes": self.page_bytes,
            "n_bytes": self.n_bytes,
            "layers": [asdict(layer) for layer in self.layers],
        }
        path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read and check the file `path`. Raises FileFormatError with one line."""
        try:
            with open(path, "rb") as file:
                document = json.load(file) if os.fstat(file.fileno()).st_size <= _MAX_MANIFEST_BYTES else None
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror}; run `rimuru convert` again") from None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
            raise FileFormatError(f"{path}: this is no manifest of converted experts; run `rimuru convert` again")
        if document.get("version") != FORMAT_VERSION:
            raise FileFormatError(
                f"{path}: format version {document.get('version')!r} is not supported ({FORMAT_VERSION} is); "
                "run `rimuru convert` again"
            )
        return _Reader(path).manifest(document)


class _Reader:
    """Turns the parsed document into a Manifest; every field is checked before it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fault(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: {what}; run `rimuru convert` again")

    def field(self, record: object, name: str, kind: type) -> object:
        value = record.get(name) if isinstance(record, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fault(f"field {name} is missing or no {kind.__name__}")
        return value

    def text(self, record: object, name: str) -> str:
        return str(self.field(record, name, str))

    def count(self, record: object, name: str, lowest: int = 1) -> int:
        value = self.field(record, name, int)
        assert isinstance(value, int)
        if not lowest <= value < 1 << 62:
            raise self.fault(f"field {name} is {value}")
        return value

    def items(self, record: object, name: str) -> list[object]:
        value = self.field(record, name, list)
        assert isinstance(value, list)
        return value

    def numbers(self, record: object, name: str) -> tuple[int, ...]:
        values = self.items(record, name)
        if not all(type(value) is int for value in values):
            raise self.fault(f"field {name} holds something that is no integer")
        return tuple(value for value in values if isinstance(value, int))

    def manifest(self, document: dict[str, object]) -> Manifest:
        source = self.field(document, "source", dict)
        identity = self.field(source, "identity", dict)
        assert isinstance(identity, dict)
        page_bytes = self.count(document, "page_bytes")
        layers: list[LayerEntry] = []
        offset_bytes = 0
        for record in self.items(document, "layers"):
            layer = self.layer(record, page_bytes, offset_bytes)
            layers.append(layer)
            offset_bytes += layer.n_experts * layer.n_pages * page_bytes
        if self.count(document, "n_bytes", 0) != offset_bytes:
            raise self.fault(f"field n_bytes does not fit the layers, which take {offset_bytes} bytes")
        return Manifest(
            source_path=self.text(source, "path"),
            source_relative=self.text(source, "relative"),
            source_identity=identity,
            architecture=self.text(document, "architecture"),
            page_bytes=page_bytes,
            n_bytes=offset_bytes,
            layers=tuple(layers),
        )

    def layer(self, record: object, page_bytes: int, start_bytes: int) -> LayerEntry:
        n_experts, n_pages = self.count(record, "n_experts"), self.count(record, "n_pages")
        projections: list[ProjectionEntry] = []
        used_pages = 0
        for item in self.items(record, "projections"):
            projection = self.projection(item, page_bytes)
            if projection.first_page != used_pages:
                raise self.fault(f"the pages of {projection.tensor} are not side by side")
            used_pages += projection.n_pages
            first_bytes = start_bytes + projection.first_page * page_bytes
            stride_bytes = n_pages * page_bytes
            # The counts first: a range of n_experts numbers is only made when that many are really there.
            if not len(projection.offset_bytes) == len(
                projection.crc32
            ) == n_experts or projection.offset_bytes != tuple(
                range(first_bytes, first_bytes + n_experts * stride_bytes, stride_bytes)
            ):
                raise self.fault(f"offset_bytes or crc32 of {projection.tensor} do not fit {n_experts} experts")
            projections.append(projection)
        if used_pages != n_pages or not projections:
            raise self.fault(f"an expert of {n_pages} pages has projections of {used_pages} pages")
        return LayerEntry(self.count(record, "layer", 0), n_experts, n_pages, tuple(projections))

    def projection(self, record: object, page_bytes: int) -> ProjectionEntry:
        values: dict[str, object] = {}
        for item in fields(ProjectionEntry):
            if item.type == "str":
                values[item.name] = self.text(record, item.name)
            elif item.type == "int":
                values[item.name] = self.count(record, item.name, 0 if item.name in ("tensor_row", "first_page") else 1)
            else:
                values[item.name] = self.numbers(record, item.name)
        entry = ProjectionEntry(**values)  # type: ignore[arg-type]
        fmt = BY_NAME.get(entry.format)
        sound = (
            fmt is not None
            and entry.name in _PROJECTION_NAMES
            and entry.n_in % fmt.block_elements == 0
            and entry.row_bytes == fmt.row_bytes(entry.n_in)
            and entry.rows_per_page * entry.row_bytes <= page_bytes
            and entry.n_pages == ceil_div(entry.n_rows, entry.rows_per_page)
            and entry.n_bytes == entry.n_rows * entry.row_bytes
            and entry.tensor_row + entry.n_rows <= entry.tensor_rows
        )
        if not sound:
            raise self.fault(f"the numbers of {entry.tensor} contradict each other")
        return entry
