#!/usr/bin/env python3
"""The table of supported models, from the registry of architectures.

    python tools/supported_models.py                   prints it
    python tools/supported_models.py --write README.md puts it between the file's markers

A test holds the README to it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script
from rimuru.arch.registry import architectures, can_run, published_models

BEGIN, END = "<!-- supported models: tools/supported_models.py -->", "<!-- end of supported models -->"


def table() -> str:
    """Markdown: one row per architecture, those that run first."""
    rows = ["| architecture | models | CPU | CUDA |", "| --- | --- | --- | --- |"]
    for name in sorted(architectures(), key=lambda name: (not can_run(name), name)):
        runs = ["yes" if can_run(name, backend) else "not yet" for backend in ("cpu", "cuda")]
        rows.append(f"| `{name}` | {published_models(name)} | {' | '.join(runs)} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """The text with the current table between its markers. Raises ValueError without markers."""
    start, stop = text.find(BEGIN), text.find(END)
    if start < 0 or stop < start:
        raise ValueError(f"the file needs the lines {BEGIN} and {END}")
    return f"{text[: start + len(BEGIN)]}\n\n{table()}\n\n{text[stop:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this file")
    args = parser.parse_args()
    if args.write is None:
        print(table())
        return
    try:
        args.write.write_text(with_table(args.write.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"{args.write}: {error}")


if __name__ == "__main__":
    main()
