#!/usr/bin/env python3
"""Stage 5: what the trained model is worth, and how it routes.

    tools/demo_model/evaluate.py --weights trained --data demo_data --out tools/results [--only perplexity,samples]

perplexity  of the held-out text, by source: each type of MIXES and the dense twin, on the CPU   -> demo_model.json
samples     twenty answers at temperature 0.7, not chosen: ten prompts, two seeds each           -> demo_samples.md
routing     hit rates of recently-used caches, repeats, skew, next layer's experts foretold by its router, from the
            float32 model in PyTorch over the held-out text                -> demo_model.json, demo_routing.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from export import export, read_weights
from prepare import SHIPPED
from routing import PUBLISHED_FRACTIONS, PUBLISHED_HITS, routing_figures

from rimuru import LLM, SamplingParams
from rimuru.commands.perplexity import evaluate as perplexity_of

MIXES = ("f32", "f16", "q8_0", "demo", "q5_0", "q4_0")
WINDOW_TOKENS = 512
TEMPERATURE, ANSWER_TOKENS = 0.7, 200
PROMPTS = (
    "Once upon a time",
    "One day, Tom went to the",
    "There was a little girl named Sue.",
    "It was raining.",
    "The old man had a",
)
REQUESTS = (
    "Tell me a story about a boy named Jack who lost his hat.",
    "Write a short story about a girl named Mia and a dragon.",
    "I want to hear a story about a rabbit who was afraid of the dark.",
    "Can you tell a story about two friends who share a ball?",
    "Please tell me a short story about a cat and a birthday cake.",
)


def open_model(path: Path) -> LLM:
    return LLM(path, device="cpu", context=1024, memory="512MiB")


def perplexities(weights: Path, data: Path) -> dict[str, Any]:
    """By type: perplexity of each source's part of the held-out text and of all, tokens, bytes of the file."""
    stories = (data / "held_out.txt").read_text(encoding="utf-8").split("<|endoftext|>")[:-1]
    parts: dict[str, list[str]] = {}
    for name, n in SHIPPED.items():
        parts[name], stories = stories[:n], stories[n:]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, quants in (("moe", MIXES), ("dense", ("f16", "q8_0"))):
            if not (weights / f"losses-{kind}.json").exists() or not list(weights.glob(f"{kind}-*.npz")):
                continue
            tensors, about = read_weights(weights, kind)
            for quant in quants:
                path = Path(folder) / "model.gguf"
                export(tensors, about["shape"], data / "tokenizer.json", path, quant, "demo")
                with open_model(path) as llm:
                    row: dict[str, Any] = {"bytes": path.stat().st_size}
                    nll = n_tokens = 0.0
                    for name, texts in parts.items():
                        ids = llm.tokenize("".join(f"{text}<|endoftext|>" for text in texts))
                        result = perplexity_of(llm, ids, WINDOW_TOKENS)
                        row[name] = round(result["perplexity"], 4)
                        nll += result["nll_mean"] * result["scored_tokens"]
                        n_tokens += result["scored_tokens"]
                    row["all"] = round(math.exp(nll / n_tokens), 4)
                    row["tokens"] = int(n_tokens)
                found[f"{kind}-{quant}"] = row
                print(kind, quant, row, flush=True)
    return found


def samples(model: Path) -> str:
    """Twenty answers as Markdown."""
    lines = [
        "# Twenty answers of the demo model",
        "",
        f"Ten prompts, seeds 0 and 1, temperature {TEMPERATURE}, at most {ANSWER_TOKENS} tokens, on the CPU; not "
        "chosen, not corrected. Made by `tools/demo_model/evaluate.py --only samples`.",
    ]
    with open_model(model) as llm:
        for seed in (0, 1):
            params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=TEMPERATURE, seed=seed)
            chats = [llm.chat_ids([{"role": "user", "content": text}]) for text in REQUESTS]
            answers = llm.generate([*map(llm.tokenize, PROMPTS), *chats], params)
            for prompt, answer in zip([*PROMPTS, *REQUESTS], answers, strict=True):
                text = answer.text.strip().replace("\n", "\n> ")
                if prompt in PROMPTS:
                    text = f"**{prompt}**{answer.text.rstrip()}".replace("\n", "\n> ")
                title = "prompt" if prompt in PROMPTS else f"request: {prompt}"
                end = "" if answer.finish_reason == "stop" else " [...]"
                lines += ["", f"*{title}; seed {seed}*", "", f"> {text}{end}"]
    return "\n".join(lines) + "\n"


def plot(figures: dict[str, Any], path: Path) -> bool:
    """The hit curves beside the published ones; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, hits in PUBLISHED_HITS.items():
        points = [(f, h) for f, h in zip(PUBLISHED_FRACTIONS, hits, strict=True) if h is not None]
        axes.plot(*zip(*points, strict=True), "--", linewidth=1, marker=".", label=f"{name}, published")
    axes.plot(figures["fractions"], figures["hits"], "k-", linewidth=2, marker="o", label="demo model, measured")
    axes.plot([0, 1], [0, 1], ":", color="gray", label="no locality")
    axes.set(xlabel="resident fraction of a layer's experts", ylabel="hits of a recently-used cache", xlim=(0, 1))
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="the GGUF for samples (default: exported as `demo`)")
    parser.add_argument("--only", default="perplexity,samples,routing")
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(","))
    path = options.out / "demo_model.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    weights, about = read_weights(options.weights, "moe")
    result["training"] = {
        kind: {k: v for k, v in json.loads((options.weights / f"losses-{kind}.json").read_text()).items() if k != "log"}
        for kind in ("moe", "dense")
        if (options.weights / f"losses-{kind}.json").exists()
    }
    result["corpus"] = json.loads((options.data / "corpus.json").read_text())
    if "routing" in wanted:
        text = (options.data / "held_out.txt").read_text(encoding="utf-8")
        result["routing"] = routing_figures(weights, about["shape"], options.data / "tokenizer.json", text)
        plot(result["routing"], options.out / "demo_routing.svg")
        print(json.dumps(result["routing"]), flush=True)
    if "samples" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or Path(folder) / "demo.gguf"
            if options.model is None:
                export(weights, about["shape"], options.data / "tokenizer.json", model, "demo", "Rimuru demo")
            (options.out / "demo_samples.md").write_text(samples(model), encoding="utf-8")
    if "perplexity" in wanted:
        result["perplexity"] = perplexities(options.weights, options.data)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
