"""The resident (non-expert) tensors: uploaded once, handed to the layers under their GGUF names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rimuru.base.errors import FileFormatError
from rimuru.formats.gguf import GgufFile
from rimuru.formats.quants import BY_NAME
from rimuru.formats.quants_ref import dequantize
from rimuru.memory.specs import PoolLayout
from rimuru.ops.base import Array, Ops, Weight

Progress = Callable[[int], None]


@dataclass(slots=True)
class TensorReader:
    """Reads tensors of one file for one backend and counts what they take on the device.

    Nothing is read twice: a matrix asked for again (the tied head) is the same Weight.
    """

    gguf: GgufFile
    ops: Ops
    progress: Progress
    n_bytes: int = 0
    _matrices: dict[str, Weight] | None = None

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def host(self, name: str) -> np.ndarray:
        """The tensor's raw bytes as rows: uint8 [n_rows, row_bytes], in fresh host memory."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise FileFormatError(f"{self.gguf.path}: the tensor {name} is missing")
        raw = np.empty(info.n_bytes, np.uint8)
        self.gguf.read_into(name, 0, raw)
        self.progress(info.n_bytes)
        return raw.reshape(info.n_rows, info.row_bytes)

    def matrix(self, name: str) -> Weight:
        """The matrix `name` as it lies in the file."""
        if self._matrices is None:
            self._matrices = {}
        if name not in self._matrices:
            self._matrices[name] = self._upload(name, self.host(name))
        return self._matrices[name]

    def permuted(self, name: str, row_order: np.ndarray) -> Weight:
        """The matrix whose row i is row row_order[i] of the tensor: rows are whole blocks, so bytes move unchanged."""
        return self._upload(name, np.ascontiguousarray(self.host(name)[row_order]))

    def computed(self, values: np.ndarray) -> Weight:
        """A float32 matrix [n_out, n_in] that the file does not hold in this form."""
        raw = np.ascontiguousarray(values, np.float32)
        self.n_bytes += raw.nbytes
        return self.ops.weight(raw.view(np.uint8), BY_NAME["f32"], raw.shape[1])

    def _upload(self, name: str, raw: np.ndarray) -> Weight:
        info, factors = self.gguf.tensors[name], self.factors(name)
        self.n_bytes += raw.nbytes
        weight = self.ops.weight(raw, info.format, info.n_in)
        return weight if factors is None else replace(weight, factor=float(factors[0]))

    def factors(self, name: str) -> np.ndarray | None:
        """What the products of an NVFP4 tensor are multiplied with: float32, one number, or one for each expert."""
        companion = name.removesuffix(".weight") + ".scale"
        info = self.gguf.tensors.get(name)
        if info is None or info.format.name != "nvfp4" or companion not in self.gguf.tensors:
            return None
        return dequantize(self.host(companion), self.gguf.tensors[companion].format).reshape(-1)

    def host_vector(self, name: str) -> np.ndarray | None:
        """The tensor as float32 in host memory, in NumPy order (last file axis first); None where absent.

        A bias is divided by its matrix's factor, which `linear` multiplies with the product and the bias.
        """
        info = self.gguf.tensors.get(name)
        if info is None:
            return None
        values, own = dequantize(self.host(name), info.format), self.factors(name)
        if own is not None:
            values = values * own
        factors = self.factors(name.removesuffix(".bias") + ".weight") if name.endswith(".bias") else None
        if factors is not None and factors.size == 1:
            values = values / factors
        return np.ascontiguousarray(values.reshape(_axes(name, info.shape)[::-1]), np.float32)

    def vector(self, name: str) -> Array | None:
        """The tensor as a float32 device array, or None where absent: norms, biases, convolutions, sinks."""
        values = self.host_vector(name)
        return None if values is None else self.upload(values)

    def upload(self, values: np.ndarray) -> Array:
        """A device copy of float32 values, charged to the dense weights."""
        self.n_bytes += values.nbytes
        return self.ops.upload(values)

    def required_vector(self, name: str) -> Array:
        values = self.vector(name)
        if values is None:
            raise FileFormatError(f"{self.gguf.path}: the tensor {name} is missing")
        return values


def _axes(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A vector's shape in ne order without axes of one behind it, which a file may have or leave out."""
    n_axes = 2 if "_exps." in name else 1  # the experts' biases have an axis for them, even where there is one
    while len(shape) > n_axes and shape[-1] == 1:
        shape = shape[:-1]
    return shape + (1,) * (n_axes - len(shape))


def expert_biases(layout: PoolLayout, reader: TensorReader) -> list[dict[str, Array]]:
    """Per layer slot the experts' bias vectors [n_experts, n_rows], which stay resident (gpt-oss)."""
    biases = []
    for layer in [] if layout.expert is None else layout.expert.layers:
        names: dict[str, str] = {p.name: p.tensor.removesuffix(".weight") + ".bias" for p in layer.projections}
        found = {key: reader.vector(name) for key, name in names.items()}
        biases.append({key: values for key, values in found.items() if values is not None})
    return biases


def expert_factors(layout: PoolLayout, reader: TensorReader) -> list[dict[str, Array]]:
    """Per layer slot the factors [n_experts] of the experts' products (NVFP4): of all projections, or of none."""
    factors: list[dict[str, Array]] = []
    for layer in [] if layout.expert is None else layout.expert.layers:
        found = {p.name: reader.factors(p.tensor) for p in layer.projections}
        ones = np.ones(layer.n_experts, np.float32)
        vectors = {name: ones if values is None else values for name, values in found.items()}
        wanted = any(values is not None for values in found.values())
        factors.append({name: reader.upload(values) for name, values in vectors.items()} if wanted else {})
    return factors
