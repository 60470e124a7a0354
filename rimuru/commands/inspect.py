"""rimuru inspect: what a model is and what fits, from its headers alone."""

from __future__ import annotations

import argparse

import rimuru.ops as backends
from rimuru.base.units import parse_bytes
from rimuru.commands.common import print_json
from rimuru.commands.forecast import before_loading, before_loading_text
from rimuru.engine.build import ELEMENT_BYTES, open_model
from rimuru.engine.resolve import AUTO_RAM_SHARE, available_threads
from rimuru.inspect import format_report, inspect_model


def inspect(args: argparse.Namespace) -> int:
    """Print the plan for a model file, also for one that cannot run yet."""
    from pathlib import Path

    import psutil

    memory = parse_bytes(args.memory) if args.memory else int(psutil.virtual_memory().available * AUTO_RAM_SHARE)
    element = ("f16" if args.device == "cuda" else "f32") if args.kv_type == "auto" else args.kv_type
    gguf, source = open_model(Path(args.model))
    try:
        report = inspect_model(gguf, ELEMENT_BYTES[element], memory)
        on_cpu = args.device == "cpu" or backends.choose("auto")[0] == "cpu"
        forecast = before_loading(report, args.threads or available_threads()) if on_cpu else None
    finally:
        if source is not None:
            source.close()
        gguf.close()
    if args.json:
        print_json({**report, "forecast": forecast})
        return 0
    print(format_report(report))
    if forecast is not None:
        print(before_loading_text(forecast))
    return 0
