"""From a file of cuda_src to functions on the device: the one place that builds modules.

Quoted includes are put into the text here, once each, with `#line`, so that the text is the whole source: CuPy's disk
cache is keyed by text and options and does not see files reached by `-I`. Kernels are `extern "C"`; variants are made
by `-D`. Flattening needs no CuPy, so that the sources can be compiled and checked on a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

from rimuru.base import env
from rimuru.base.errors import RimuruError
from rimuru.ops.cuda import grids

Defines = Mapping[str, "int | str"]
BASE_OPTIONS = ("-std=c++17", "-fmad=false")
"""Products and sums are fused only where a source says fmaf: the compiler would fuse them in one variant of a kernel
and not in the next, so that results depended on the batch. Inner loops say fmaf; what is left is a few instructions."""

WRITTEN: dict[str, Callable[[], str]] = {grids.PATH: grids.header}
"""Headers that are no files: what an include of that name stands for."""
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


class KernelBuildError(RimuruError):
    """A kernel could not be compiled or found."""

    code = "kernel_build_error"


@lru_cache(maxsize=1)
def source_root() -> Path:
    """The folder of the CUDA sources: RIMURU_CUDA_SRC, else the packaged copy, else the checkout's cuda_src."""
    package = Path(__file__).resolve().parents[2]
    candidates = [env.cuda_source_dir(), package / "_cuda_src", package.parent / "cuda_src"]
    for folder in candidates:
        if folder is not None and (folder / "common").is_dir():
            return folder
    raise KernelBuildError("the CUDA sources are not installed; set RIMURU_CUDA_SRC to the cuda_src folder")


def flatten(path: str, root: Path | None = None) -> str:
    """The text of root/path with every quoted include put in, once each; errors keep their file and line.

    An include is looked up beside its includer, then below the root, then among the WRITTEN ones.
    """
    root = source_root() if root is None else root
    parts: list[str] = []
    seen: set[Path] = set()

    def add(file: Path, label: str, text: str) -> None:
        seen.add(file.resolve())
        parts.append(f'#line 1 "{label}"')
        for number, line in enumerate(text.splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                parts.append("" if _ONCE.match(line) else line)
                continue
            target = next((p for p in (file.parent / include[1], root / include[1]) if p.is_file()), root / include[1])
            written = None if target.is_file() else WRITTEN.get(include[1])
            if written is None and not target.is_file():
                raise KernelBuildError(f"{label}:{number}: the include {include[1]} is neither beside it nor in {root}")
            if target.resolve() not in seen:
                text = written() if written else target.read_text()
                add(target, target.resolve().relative_to(root.resolve()).as_posix(), text)
                parts.append(f'#line {number + 1} "{label}"')
            else:
                parts.append("")

    main = root / path
    if not main.is_file():
        raise KernelBuildError(f"there is no CUDA source {path} in {root}")
    add(main, path, main.read_text())
    return "\n".join(parts) + "\n"


def compile_options(defines: Defines | None = None) -> tuple[str, ...]:
    """The compiler's options: the language level, then -D in sorted order (equal sets give equal cache keys)."""
    pairs = sorted((defines or {}).items())
    return BASE_OPTIONS + tuple(f"-D{name}={value}" for name, value in pairs)


class Module:
    """One compiled source; kernels by their extern "C" name."""

    def __init__(self, label: str, text: str, options: tuple[str, ...]) -> None:
        import cupy

        self.label = label
        self._raw = cupy.RawModule(code=text, options=options, backend="nvrtc")
        self._kernels: dict[str, Any] = {}

    def compile(self) -> None:
        """Compile now (or read CuPy's disk cache); the error names file and line."""
        import cupy

        try:
            self._raw.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise KernelBuildError(f"{self.label} does not compile for this device: {error}") from error

    def kernel(self, name: str) -> Any:
        """The raw kernel (cupy.RawKernel) of that name."""
        if name not in self._kernels:
            import cupy

            self.compile()
            try:
                self._kernels[name] = self._raw.get_function(name)
            except cupy.cuda.driver.CUDADriverError as error:
                raise KernelBuildError(f"{self.label} has no kernel {name}") from error
        return self._kernels[name]


_modules: dict[tuple[str, tuple[str, ...]], Module] = {}
_lock = threading.Lock()


def module(path: str, defines: Defines | None = None) -> Module:
    """The module of a source with these -D options; built once per process for equal text and options."""
    key = (flatten(path), compile_options(defines))
    with _lock:
        found = _modules.get(key)
        if found is None:
            found = _modules[key] = Module(path, *key)
        return found


Progress = Callable[[int, int], None]


def start_compiling(
    sources: Iterable[tuple[str, Defines]], n_threads: int | None = None
) -> Callable[[Progress | None], None]:
    """Compile many (path, defines) in threads, one a core where not said. The result waits for them and calls
    progress(done, total) after each; the first error is raised then."""
    import cupy

    unique = {(path, compile_options(defines)): (path, defines) for path, defines in sources}
    device_id = cupy.cuda.runtime.getDevice()

    def build(path: str, defines: Defines) -> None:
        cupy.cuda.runtime.setDevice(device_id)  # the current device is a property of the thread
        module(path, defines).compile()

    pool = ThreadPoolExecutor(n_threads or _n_cores(), thread_name_prefix="nvrtc")
    futures = [pool.submit(build, path, defines) for path, defines in unique.values()]
    pool.shutdown(wait=False)

    def finish(progress: Progress | None) -> None:
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress is not None:
                progress(done, len(futures))

    return finish


def compile_all(
    sources: Iterable[tuple[str, Defines]], progress: Progress | None = None, n_threads: int | None = None
) -> None:
    """Compile many (path, defines) in threads; `progress(done, total)` after each. The first error is raised."""
    start_compiling(sources, n_threads)(progress)


def _n_cores() -> int:
    """Cores that this process may use, at most 32."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 32)
