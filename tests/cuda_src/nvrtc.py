"""Compiling the CUDA sources without a GPU, by the compiler library from its package (nvidia-cuda-nvrtc).

The headers cuda_fp16.h and cuda_bf16.h come with nvidia-cuda-runtime, and what they include with nvidia-cuda-cccl.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

from rimuru.ops.cuda.loader import Defines, compile_options, flatten


def _package_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _find(*patterns: str) -> list[Path]:
    return [path for folder in _package_folders() for pattern in patterns for path in sorted(folder.glob(pattern))]


@cache
def library() -> ctypes.CDLL | None:
    """libnvrtc of the installed package, or None."""
    found = _find("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")
    names = [path for path in found if "builtins" not in path.name and ".alt." not in path.name]
    return ctypes.CDLL(str(names[0])) if names else None


@cache
def include_folders() -> tuple[Path, ...]:
    """Folders that hold the number types' headers and what they include."""
    headers = _find("cu*/include/cuda_fp16.h", "cuda_runtime/include/cuda_fp16.h")
    more = _find("cu*/include/cccl", "cuda_cccl/include")
    return tuple(path.parent for path in headers) + tuple(more)


def available() -> bool:
    """True where library and headers are installed."""
    return library() is not None and bool(include_folders())


def compile_source(
    path: str, defines: Defines, architecture: int, root: Path | None = None, kind: str = "CUBIN"
) -> bytes:
    """The machine code (or with kind="PTX" the assembler text) of a source of cuda_src for sm_<architecture>;
    AssertionError with the compiler's log."""
    nvrtc = library()
    assert nvrtc is not None
    text = flatten(path, root)
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), path.encode(), 0, None, None) == 0
    options = [*compile_options(defines), f"--gpu-architecture=sm_{architecture}", "-ftz=true"]
    options += [f"-I{folder}" for folder in include_folders()]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(options), array)
        assert code == 0, f"{path} {dict(defines)} for sm_{architecture}:\n{_log(nvrtc, program)}"
        size = ctypes.c_size_t()
        assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
        result = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{kind}")(program, result) == 0
        return result.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")
