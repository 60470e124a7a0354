"""general.architecture -> the module that describes it. Modules of this package that declare NAMES are found by scan.

An architecture module has
    NAMES     the values of general.architecture that it reads
    MODELS    name -> published models of it, for people
    RUNNABLE  name -> backends that can run it now; what is missing can be inspected and planned only
    read_config(base) -> ModelConfig
and may have EPS_KEY, the norm epsilon's key where it is not the usual one. Adding an architecture is adding a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

import rimuru.arch
from rimuru.arch.common import Gguf, read_base
from rimuru.arch.spec import ModelConfig
from rimuru.base.errors import UnsupportedModelError

DEFAULT_EPS_KEY = "attention.layer_norm_rms_epsilon"


@cache
def _modules() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(rimuru.arch.__path__):
        module = importlib.import_module(f"rimuru.arch.{info.name}")
        for name in getattr(module, "NAMES", ()):
            if name in found:
                raise ValueError(f"architecture {name} is declared by {found[name].__name__} and {module.__name__}")
            found[name] = module
    return found


def architectures() -> tuple[str, ...]:
    """Names of all architectures that can be described and planned, sorted."""
    return tuple(sorted(_modules()))


def runnable_architectures(backend: str | None = None) -> tuple[str, ...]:
    """Names of those that a backend (None: any) can run, sorted."""
    return tuple(name for name in architectures() if can_run(name, backend))


def can_run(architecture: str, backend: str | None = None) -> bool:
    """Whether a backend (None: any) can run the architecture."""
    module = _modules().get(architecture)
    backends = module.RUNNABLE.get(architecture, ()) if module else ()
    return bool(backends) if backend is None else backend in backends


def published_models(architecture: str) -> str:
    """Published models of a known architecture, for people."""
    models: str = _modules()[architecture].MODELS[architecture]
    return models


def read_config(gguf: Gguf, context: int | None = None) -> ModelConfig:
    """The description of a model file. `context`: the configured context in tokens (None: the file's).

    Raises UnsupportedModelError (unknown architecture or variant), FileFormatError (missing or senseless keys).
    """
    module = _modules().get(gguf.architecture)
    if module is None:
        raise UnsupportedModelError(
            f"{gguf.path}: architecture {gguf.architecture!r:.80} is not supported; "
            f"supported: {', '.join(architectures())}"
        )
    config: ModelConfig = module.read_config(read_base(gguf, context, getattr(module, "EPS_KEY", DEFAULT_EPS_KEY)))
    return config


def require_runnable(config: ModelConfig, backend: str | None = None) -> None:
    """Raise UnsupportedModelError, with the list of those that run, unless the backend can run the model."""
    if not can_run(config.architecture, backend):
        where = f" on {backend}" if can_run(config.architecture) else ""
        raise UnsupportedModelError(
            f"models of architecture {config.architecture} can be inspected, but not run{where} yet; "
            f"runnable: {', '.join(runnable_architectures(backend))}"
        )
