"""CUDA kernels on the host, behind the real launchers: a stand-in for CuPy's arrays and for Kernel's launch.

Each kernel is compiled by the host's C++ compiler with host_device.hpp in front of its flattened source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.loader import flatten

HEADER = Path(__file__).resolve().parent / "host_device.hpp"
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off")
IN_PTX = (
    "shared_address", "copy_async16", "copy_async_float", "commit_copies", "wait_copies", "load_matrices",
    "load_matrices_transposed", "multiply_add", "multiply_add_tf32", "transpose_matrix",
)  # fmt: skip
"""Functions of the sources that are written in PTX; host_device.hpp has their meaning."""

_PACKERS = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "u64": np.uint64}


def compiler() -> str | None:
    """The host's C++ compiler, if it knows 16-bit floats."""
    return shutil.which("g++")


def host_source(path: str, kernel_name: str) -> str:
    """The C++ text of one kernel and a launch function for it."""
    text = flatten(path)
    text = re.sub(r"^\s*#\s*include\s*<[^>]*>", "", text, flags=re.M)
    for name in IN_PTX:
        text = _cut(text, name)
    text = re.sub(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* \2 = (\1*)host_shared;", text)
    launch = f'extern "C" void launch(const int* d, const void** v) {{ launch({kernel_name}, d, v); }}\n'
    return f'#include "{HEADER}"\n{text}\n{launch}'


def _cut(text: str, name: str) -> str:
    """The text without the definition of one device function."""
    start = re.search(rf"^(template <int N>\n)?__device__ [^\n]*\b{name}\(", text, flags=re.M)
    if start is None:
        return text
    at = text.index("{", start.end())
    depth, end = 1, at + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[: start.start()] + "\n" * text.count("\n", start.start(), end) + text[end:]


class Emulator:
    """Compiles kernels and launches them. What one test file of a run has compiled, the others find."""

    def __init__(self, folder: Path) -> None:
        """folder: one of pytest's, in that of a worker or of the run."""
        run = folder.parent.parent if folder.parent.name.startswith("popen-gw") else folder.parent
        self.folder = run / "emulated kernels"
        self.folder.mkdir(exist_ok=True)
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.launched: list[str] = []

    def built(self, kernel: Kernel) -> ctypes.CDLL:
        source = host_source(kernel.path, kernel.name)
        options = [f"-D{name}={value}" for name, value in sorted(kernel.defines.items())]
        key = hashlib.sha256("\n".join([source, *options]).encode()).hexdigest()[:24]
        if key not in self.libraries:
            out = self.folder / f"{key}.so"
            if not out.exists():
                mine = self.folder / f"{key}.{os.getpid()}"  # another worker may be compiling the same
                program = mine.with_suffix(f"{mine.suffix}.cpp")
                program.write_text(source.replace(str(HEADER), str(self._header()), 1))
                command = [str(compiler()), *FLAGS, "-shared", *options, str(program), "-o", str(mine)]
                subprocess.run(command, check=True)
                mine.replace(out)
            self.libraries[key] = ctypes.CDLL(str(out))
        return self.libraries[key]

    def _header(self) -> Path:
        """host_device.hpp with its compiled form beside it: most of a small kernel's compilation is that header."""
        header = self.folder / HEADER.name
        compiled = self.folder / f"{HEADER.name}.gch"
        if not compiled.exists():
            mine = self.folder / f"{HEADER.name}.{os.getpid()}"
            shutil.copy(HEADER, mine)
            mine.replace(header)
            subprocess.run([str(compiler()), *FLAGS, "-x", "c++-header", str(header), "-o", str(mine)], check=True)
            mine.replace(compiled)
        return header

    def launch(self, kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert len(args) == len(kernel.parameters), kernel.name
        self.launched.append(kernel.name)
        values = []
        for (_, kind), arg in zip(kernel.parameters, args, strict=True):
            if kind in _PACKERS:
                values.append(_PACKERS[kind](arg).reshape(1))
            else:
                values.append(np.array([address(arg)], np.uint64))
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        dims = np.array([*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))], np.int32)
        self.built(kernel).launch(ctypes.c_void_p(dims.ctypes.data), pointers)


def address(array: Any) -> int:
    """Address of a host array, of an int (itself) or of None (0)."""
    if array is None:
        return 0
    return array if isinstance(array, int) else int(array.ctypes.data)


def aligned(shape: Any, dtype: Any) -> np.ndarray:
    """An array that starts at a multiple of 256 bytes, filled with NaN patterns, with a word of memory after it."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(n_bytes + 512, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + n_bytes].view(dtype).reshape(shape)


def upload(values: np.ndarray) -> np.ndarray:
    """An aligned copy."""
    copy = aligned(values.shape, values.dtype)
    copy[...] = values
    return copy


def fake_cupy() -> types.ModuleType:
    """What the launchers of matmul and moe use of CuPy."""
    module = types.ModuleType("cupy")
    module.empty = aligned  # type: ignore[attr-defined]
    module.asarray = upload  # type: ignore[attr-defined]
    module.zeros = lambda shape, dtype: upload(np.zeros(shape, dtype))  # type: ignore[attr-defined]
    return module


class EmulatedOps:
    """The verbs of matmul and moe through their launchers."""

    name = "cuda, emulated"

    def __init__(self, deterministic: bool = False) -> None:
        from rimuru.ops.cuda import matmul, moe, pointwise, routing

        self.deterministic = deterministic
        self._matmul, self._moe, self._pointwise = matmul, moe, pointwise
        self.linear, self.weight = matmul.linear, matmul.weight
        self.choose_experts = routing.Router()
        self.route, self.moe_experts, self.moe_combine = routing.route, moe.moe_experts, moe.moe_combine
        self.replay_routing, self.upload = routing.replay_routing, upload
        self.empty = aligned

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def act(self, n_tokens: int, width: int) -> Any:
        return self._matmul.act(n_tokens, width, self.deterministic)

    def moe_scratch(self, max_tokens: int, spec: Any, n_in: int) -> Any:
        return self._moe.moe_scratch(max_tokens, spec, n_in, self.deterministic)

    def glu(self, gate: np.ndarray | None, up: np.ndarray, activation: str, out: Any) -> None:
        """Brings values into an activation."""
        assert gate is None and activation == "identity"
        self._pointwise.glu(gate, up, activation, out)
