"""How far float32 states drift from float64 ones while an answer is decoded. Writes tools/results/state_drift.json.

    python tools/bench/state_drift.py [--tokens 2000] [--device cpu] [--models qwen35moe,..] [--output FILE]

Small random models with float32 weights decode one token after the other; tests/naive runs the same tokens in float64.
Errors are normalised: |found - expected|^2 / |expected|^2, of a layer's state after the last token, and of the logits
over eight parts of the answer. On a GPU, keys and values are kept in 16 bits, which layers behind an attention see.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from naive.model import naive_run  # noqa: E402

from rimuru import LLM, SamplingParams  # noqa: E402
from rimuru.arch.spec import DeltaNetSpec  # noqa: E402
from rimuru.formats.gguf import open_gguf  # noqa: E402
from tools.make_random_gguf import KEYS, write_random_model  # noqa: E402

MODELS = ("qwen35moe", "qwen3next", "granitehybrid", "nemotron_h_moe", "jamba")
N_PROMPT, N_WINDOWS = 8, 8


def measure(arch: str, n_tokens: int, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Decode n_tokens after a prompt of eight; errors of states and logits against float64."""
    options: dict[str, Any] = {"threads": 2, "kv_type": "f32"} if device == "cpu" else {"memory": "1GiB"}
    context = n_tokens + N_PROMPT + 2
    # On a GPU all experts are used: a rounding that flips the choice of one says nothing about states.
    all_used = device != "cpu" and "expert_count" in KEYS[arch]
    changes = {"expert_count": 4, "expert_used_count": 4} if all_used else {}
    path = write_random_model(
        folder / f"{arch}.gguf", arch, "f32", seed=5, tokenizer=False, context_length=context, **changes
    )
    with LLM(path, device=device, context=context, **options) as llm:
        engine = llm.loaded.engine
        params = SamplingParams(max_tokens=n_tokens + 2, temperature=1.0, seed=1, ignore_eos=True)
        sequence = engine.add(list(range(1, N_PROMPT + 1)), params)
        while sequence.n_cached < N_PROMPT + n_tokens:
            engine.step()
        states = _states(llm, sequence.seq_id)
        engine.finish(sequence)
        tokens = sequence.tokens[: N_PROMPT + n_tokens]
        logits = llm.logits(tokens, chunk=None if device == "cpu" else 1)
    with open_gguf(path) as gguf:
        expected, expected_states = naive_run(gguf, tokens, context)
    by_layer = {name: _error(states[name], expected_states[name]) for name in sorted(expected_states)}
    per_token = ((logits - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
    return {
        "state_error_by_layer": by_layer,
        "state_error_max": max(by_layer.values()),
        "distinct_tokens": len(set(tokens)),
        "logit_error_per_window": [float(part.mean()) for part in np.array_split(per_token, N_WINDOWS)],
        "logit_error_max": float(per_token.max()),
    }


def _states(llm: LLM, seq_id: int) -> dict[str, np.ndarray]:
    """Copies of a sequence's recurrent states by prefix, shaped as tests/naive shapes them."""
    loaded = llm.loaded
    layout, cache = loaded.layout.ssm, loaded.engine.cache
    copier = loaded.pool.copier
    assert layout is not None and copier is not None
    pages = cache.states.pages(cache._slots[seq_id])["ssm"]
    found = {}
    for index, address in zip(layout.layers, loaded.pool.addresses("ssm", pages).tolist(), strict=True):
        raw = np.empty(layout.state_bytes, np.uint8)
        copier.copy_out(raw, address)
        copier.wait()
        state: np.ndarray = raw.view(np.float32).astype(np.float64)
        spec = loaded.config.layers[index].mixer
        if isinstance(spec, DeltaNetSpec):  # stored [heads, v, k]
            state = state.reshape(spec.n_value_heads, spec.head_dim, spec.head_dim).transpose(0, 2, 1)
        found[f"blk.{index}."] = state
    return found


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    difference = found.reshape(expected.shape) - expected
    return float((difference**2).sum() / (expected**2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=ROOT / "tools/results/state_drift.json")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {arch: measure(arch, args.tokens, Path(folder), args.device) for arch in args.models}
    written = {"tokens": args.tokens, "device": args.device, "models": results}
    args.output.write_text(json.dumps(written, indent=1) + "\n")
    for arch, result in results.items():
        print(arch, {key: value for key, value in result.items() if not isinstance(value, dict)})


if __name__ == "__main__":
    main()
