"""Turns kernels of `simd.py` into machine code: an address to call, and an object file cached on disk.

The cache key is a digest of the sources that emit kernels, the kernel's name, the processor and the versions, so an
edit never meets old code. A damaged cache file is noticed by its checksum and rebuilt.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config as _numba_config

from rimuru.base import env
from rimuru.ops.cpu.simd import GENERIC, Emitter, Isa, Kernel, choose_isa

numba_config: Any = _numba_config  # its names are made at run time
_FOLDER = Path(__file__).resolve().parent


@cache
def host_isa() -> Isa:
    """The variant that this process uses: the processor's best, or the plain one (RIMURU_CPU_KERNELS=generic)."""
    return GENERIC if env.cpu_kernels() == "generic" else choose_isa(dict(llvm.get_host_cpu_features()))


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _sources_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted([*_FOLDER.glob("simd*.py"), *_FOLDER.glob("dot*.py"), *_FOLDER.glob("quantize*.py")]):
        digest.update(path.read_bytes())
    for text in (llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()):
        digest.update(text.encode())
    return digest.digest()


def _cache_folder() -> Path | None:
    """Where object files are kept: Numba's cache folder if one is set, beside the code, or in the user's cache."""
    own = [Path(numba_config.CACHE_DIR)] if numba_config.CACHE_DIR else []
    for folder in (*own, _FOLDER / "__pycache__", *env.user_cache_folders()):
        if env.is_writable(folder):
            return folder
    return None


_cache_folder_once = cache(_cache_folder)


def _read_cached(path: Path) -> bytes | None:
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    checksum, code = blob[:32], blob[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write_cached(path: Path, code: bytes) -> None:
    """Keep code, in place of what older sources made of the same kernel."""
    try:
        for old in path.parent.glob(path.name.rpartition("-")[0] + "-*.o"):
            old.unlink()
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).replace(path)
    except OSError:
        pass  # a full or read-only disk only costs the next start its time


def emit_text(name: str, n_args: int, emitter: Emitter, isa: Isa) -> str:
    """LLVM IR of one kernel."""
    module = ir.Module(name)
    module.triple = llvm.get_default_triple()
    kernel = Kernel(module, name, n_args, isa)
    emitter(kernel, *kernel.args)
    kernel.finish()
    # processors that prefer 256-bit vectors would split the 512-bit ones that the dot instructions need
    return re.sub(r"^(define .*\))$", r'\1 nounwind "min-legal-vector-width"="512"', str(module), flags=re.MULTILINE)


def compile_object(text: str) -> bytes:
    """Object code of LLVM IR, optimised for this processor."""
    machine = _target_machine()
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


_engines: list[Any] = []  # keep the code alive as long as the process


@cache
def build(name: str, n_args: int, emitter: Emitter, isa: Isa) -> int:
    """Address of a kernel void(int64 * n_args). Names must differ between kernels."""
    key = hashlib.sha256(_sources_digest() + f"{name} {isa}".encode()).hexdigest()[:24]
    folder = _cache_folder_once()
    path = folder / f"{name}-{isa.name}-{key}.o" if folder else None
    code = _read_cached(path) if path else None
    if code is None:
        code = compile_object(emit_text(name, n_args, emitter, isa))
        if path:
            _write_cached(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)
