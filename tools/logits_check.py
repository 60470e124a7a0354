#!/usr/bin/env python3
"""Compare a backend's logits with the reference logits of small models, as a table and JSON.

    python tools/logits_check.py --device cuda --models DIR --expected DIR [--json FILE] [NAME ...]

MODELS holds NAME.gguf, EXPECTED holds NAME.npz (tokens, logits). Each model is run token by token (the decode path) and
in one piece (the prefill path). `median`: normalised squared error at the median position.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rimuru import LLM
from rimuru.arch.registry import can_run
from rimuru.base.errors import RimuruError
from rimuru.formats.gguf import open_gguf

PLAIN_BOUND, QUANTISED_BOUND = 3e-5, 1.5e-3
LATENT_BOUND = 1e-3
"""deepseek2-lite: 27 layers without a query rank; its reference's own error is larger too."""


def check(path: Path, case: Path, device: str, chunks: list[int], **options: object) -> dict[str, object]:
    """Errors of one model for each chunk size; keys name, bound, ok, chunks, seconds."""
    data = np.load(case)
    tokens, expected = data["tokens"].tolist(), data["logits"].astype(np.float64)
    with open_gguf(path) as gguf:
        plain = all(info.format.is_float for info in gguf.tensors.values())
    bound = PLAIN_BOUND if plain else QUANTISED_BOUND
    if path.stem == "deepseek2-lite":
        bound = LATENT_BOUND
    started, rows = time.monotonic(), {}
    with LLM(path, device=device, context=512, **options) as llm:
        for chunk in chunks:
            found = llm.logits(tokens, chunk=chunk)
            error = ((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
            rows[str(chunk)] = {
                "median": float(np.median(error)),
                "worst": float(error.max()),
                "top1": int((found.argmax(axis=1) == expected.argmax(axis=1)).sum()),
                "finite": bool(np.isfinite(found).all()),
            }
    ok = all(row["finite"] and row["median"] <= bound for row in rows.values())
    return {"name": path.stem, "bound": bound, "ok": ok, "chunks": rows, "seconds": time.monotonic() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--chunks", default="96,1", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--resident-experts", default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in args.expected.glob("*.npz"))
    results: list[dict[str, object]] = []
    for name in names:
        path = args.models / f"{name}.gguf"
        with open_gguf(path) as gguf:
            if not can_run(gguf.architecture, args.device):
                continue
        try:
            options = {} if args.resident_experts is None else {"resident_experts": args.resident_experts}
            row = check(path, args.expected / f"{name}.npz", args.device, args.chunks, **options)
        except (RimuruError, RuntimeError, AssertionError, ValueError, TypeError) as error:
            row = {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        results.append(row)
        figures = " ".join(
            f"[{chunk}] {r['median']:.1e} worst {r['worst']:.1e} top1 {r['top1']}"
            for chunk, r in row.get("chunks", {}).items()  # type: ignore[attr-defined]
        )
        print(f"{name:24} {'ok  ' if row['ok'] else 'FAIL'} {figures}{row.get('error', '')}", flush=True)
    n_ok = sum(bool(row["ok"]) for row in results)
    print(f"{n_ok} of {len(results)} models within their bound on {args.device}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if n_ok == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
