"""rimuru convert: experts of a GGUF into a `.rimuru` folder of page-aligned blobs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

from rimuru.arch.registry import read_config, require_runnable
from rimuru.arch.tensors import check_tensors
from rimuru.base.errors import BadInputError
from rimuru.commands.common import note
from rimuru.formats.demo import DEMO_NAME, is_demo
from rimuru.formats.gguf import check_formats, open_gguf
from rimuru.memory.planner import plan_layout


def converter() -> ModuleType:
    """The converters package: inside the wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "_converters", here.parent / "converters"):
        if (folder / "gguf_to_blobs.py").is_file():
            return _import_package(folder)
    raise BadInputError("the converters are missing from this installation; install rimuru again")


def _import_package(folder: Path) -> ModuleType:
    """Import folder as the package `converters`, wherever it lies, and give its gguf_to_blobs module."""
    if "converters" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "converters", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["converters"] = package
        spec.loader.exec_module(package)
    return importlib.import_module("converters.gguf_to_blobs")


def convert(args: argparse.Namespace) -> int:
    """Write the blob beside the model (or to -o; the packaged model's into this folder) and say where."""
    if Path(args.model).suffix == ".rimuru" and Path(args.model).is_dir():
        raise BadInputError(f"{args.model} has been converted already; run it, or convert the GGUF that it came from")
    with open_gguf(args.model) as gguf:
        config = read_config(gguf)
        require_runnable(config)
        check_formats(gguf.tensors)
        check_tensors(config, gguf)
        layout = plan_layout(config, gguf.tensors, 4).expert
        if layout is None:
            raise BadInputError(f"{args.model} has no routed experts: there is nothing to convert")
        blobs = converter()
        beside = Path(f"{DEMO_NAME}.rimuru") if is_demo(args.model) else blobs.default_target(gguf)
        out = Path(args.output) if args.output else beside
        hidden = args.quiet or not sys.stderr.isatty()
        with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="converting", disable=hidden) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            blobs.convert(gguf, layout, out, progress=progress, verify=args.verify)
    note(f"{out}: {layout.n_experts} experts" + (", verified" if args.verify else ""))
    return 0
