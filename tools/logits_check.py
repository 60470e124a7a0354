#!/usr/bin/env python3
"""Compare a backend's logits with the reference logits of small models, as a table and JSON.

    python tools/logits_check.py --device cuda --models DIR --expected DIR [--json FILE] [NAME ...]

MODELS holds NAME.gguf, EXPECTED holds NAME.npz (tokens, logits). Each model is run token by token (the decode path) and
in one piece (the prefill path), hybrids in pieces of 2, 7, 16 and 64 too. `median`: normalised squared error at the
median position.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rimuru import LLM
from rimuru.arch.registry import can_run, read_config
from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec
from rimuru.base.errors import RimuruError
from rimuru.formats.gguf import open_gguf

PLAIN_BOUND, QUANTISED_BOUND = 3e-5, 1.5e-3
LATENT_BOUND = 1e-3
"""deepseek2-lite: 27 layers without a query rank; its reference's own error is larger too."""

CHUNKS, HYBRID_CHUNKS = (96, 1), (96, 64, 16, 7, 2, 1)
DETERMINISTIC_CHUNKS = (96, 64, 7, 1)
RECURRENT = (DeltaNetSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec)


def check(path: Path, case: Path, device: str, chunks: list[int] | None, **options: Any) -> dict[str, Any]:
    """Errors of one model for each size of pieces (None: those of its kind); keys name, bound, ok, chunks, seconds.

    Hybrids also run with `deterministic`: `equal` says whether all its pieces gave the same bits.
    """
    data = np.load(case)
    tokens, expected = data["tokens"].tolist(), data["logits"].astype(np.float64)
    with open_gguf(path) as gguf:
        plain = all(info.format.is_float for info in gguf.tensors.values())
        is_hybrid = any(isinstance(layer.mixer, RECURRENT) for layer in read_config(gguf).layers)
    bound = PLAIN_BOUND if plain else QUANTISED_BOUND
    if path.stem == "deepseek2-lite":
        bound = LATENT_BOUND
    started = time.monotonic()
    rows: dict[str, dict[str, Any]] = {}

    def measure(found: np.ndarray) -> dict[str, Any]:
        error = ((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
        return {
            "median": float(np.median(error)),
            "worst": float(error.max()),
            "top1": int((found.argmax(axis=1) == expected.argmax(axis=1)).sum()),
            "finite": bool(np.isfinite(found).all()),
        }

    result: dict[str, Any] = {"name": path.stem, "bound": bound, "ok": True, "chunks": rows}
    with LLM(path, device=device, context=512, **options) as llm:
        for chunk in chunks or (HYBRID_CHUNKS if is_hybrid else CHUNKS):
            rows[str(chunk)] = measure(llm.logits(tokens, chunk=chunk))
    if is_hybrid:
        with LLM(path, device=device, context=512, deterministic=True, **options) as llm:
            found = [llm.logits(tokens, chunk=chunk) for chunk in DETERMINISTIC_CHUNKS]
        rows["deterministic"] = measure(found[0])
        result["equal"] = all(np.array_equal(found[0], other) for other in found)
    within = all(row["finite"] and row["median"] <= bound for row in rows.values())
    return {**result, "ok": within and result.get("equal", True), "seconds": time.monotonic() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--chunks", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--resident-experts", default=None)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in args.expected.glob("*.npz"))
    results: list[dict[str, Any]] = []
    for name in names:
        path = args.models / f"{name}.gguf"
        with open_gguf(path) as gguf:
            if not can_run(gguf.architecture, args.device):
                continue
        given = {"resident_experts": args.resident_experts, "memory": args.memory}
        try:
            options = {key: value for key, value in given.items() if value is not None}
            row = check(path, args.expected / f"{name}.npz", args.device, args.chunks, **options)
        except (RimuruError, RuntimeError, AssertionError, ValueError, TypeError) as error:
            row = {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        results.append(row)
        figures = " ".join(
            f"[{chunk}] {r['median']:.1e} worst {r['worst']:.1e} top1 {r['top1']}"
            for chunk, r in row.get("chunks", {}).items()
        )
        equal = "" if row.get("equal", True) else " deterministic pieces differ"
        print(f"{name:24} {'ok  ' if row['ok'] else 'FAIL'} {figures}{row.get('error', '')}{equal}", flush=True)
        if args.json:  # after each model: what is known stays known if the time is up
            fresh = args.json.with_suffix(".new")
            fresh.write_text(json.dumps(results, indent=1))
            fresh.replace(args.json)
    n_ok = sum(bool(row["ok"]) for row in results)
    print(f"{n_ok} of {len(results)} models within their bound on {args.device}")
    return 0 if n_ok == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
