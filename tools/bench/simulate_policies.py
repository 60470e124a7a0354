"""Policies compared on traces, simulated: the paper's case study, sensitivity, Azure traces, a single stream, ablation;
`heldout`: loads, models and cards that no constant of the policies was chosen on.

    python tools/bench/simulate_policies.py TRACES_DIR [--only NAME,NAME] [--out tools/results]

Writes simulate_NAME.json and .md (and .png with matplotlib). Deterministic by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.arch.shapes import shape_gguf
from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import GIB
from rimuru.simulate.cards import Card, card_named
from rimuru.simulate.report import Result, write_plot
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from rimuru.simulate.traces import TraceRequest, read_trace

CASE_BYTES = int(28.8 * GIB)
COLUMNS = (
    ("steps", "steps", "{:.0f}"),
    ("peak", "peak_concurrency", "{:.0f}"),
    ("mean", "mean_concurrency", "{:.1f}"),
    ("time s", "makespan_s", "{:.2f}"),
    ("ttft s", "ttft_s", "{:.2f}"),
    ("tpot ms", "tpot_s", "{:.1f}"),
    ("latency s", "latency_s", "{:.2f}"),
    ("GB moved", "bytes_moved", "{:.0f}"),
    ("hit rate", "hit_rate", "{:.3f}"),
    ("preempted", "preemptions", "{:.0f}"),
)
SCALE = {"tpot_s": 1e3, "bytes_moved": 1e-9}


def run(shape: str, quant: str, trace: list[TraceRequest], settings: Settings) -> Result | None:
    """None where the policy refuses to start."""
    started = time.time()
    try:
        result = Simulation(shape_gguf(shape, quant)[0], settings).run(trace)
    except NotEnoughMemoryError:
        return None
    print(f"  {settings.policy} {settings.admission}: {result.values['makespan_s']:.2f} s, "
          f"simulated in {time.time() - started:.1f} s", flush=True)  # fmt: skip
    return result


def case_settings(card: Card, **more: Any) -> Settings:
    """28.8 GiB hold the weights and the pool; activations and loading buffers lie beside them."""
    return Settings(**{"memory_bytes": CASE_BYTES, "card": card, "admission": "reserve"} | more)


CASE_POLICIES: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "fixed 1276": {"policy": "fixed", "resident_experts": 1276, "residency": "hotset"},
    "paper 230": {"policy": "paper", "expert_offload_limit": 230, "residency": "hotset"},
    "cost": {"policy": "cost"},
}


TRACE_POLICIES: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "fixed 0.5": {"policy": "fixed", "resident_experts": 0.5},
    "paper": {"policy": "paper"},
    "cost": {"policy": "cost"},
}


def case_study(traces: Path) -> dict[str, Result | None]:
    trace = read_trace(traces / "sharegpt_lengths.csv", 128)
    found: dict[str, Result | None] = {}
    for link, gbps in (("PCIe 5", 53.0), ("PCIe 4", 25.0)):
        card = dataclasses.replace(card_named("rtx5090"), pcie_gbps=gbps)
        for admission in ("reserve", "optimistic"):
            for name, more in CASE_POLICIES.items():
                settings = case_settings(card, **more | {"admission": admission})
                found[f"{link}, {admission}, {name}"] = run("qwen1.5-moe-a2.7b", "bf16", trace, settings)
    return found


def sensitivity(traces: Path) -> dict[str, Result | None]:
    trace = read_trace(traces / "sharegpt_lengths.csv", 128)
    found: dict[str, Result | None] = {}
    for limit in (0, 10, 20, 30, 40, 60, 90, 130, 180, 230, 300, 400):
        settings = case_settings(card_named("rtx5090"), policy="paper", expert_offload_limit=limit, residency="hotset")
        found[f"{limit}"] = run("qwen1.5-moe-a2.7b", "bf16", trace, settings)
    return found


def azure(traces: Path) -> dict[str, Result | None]:
    """Qwen3-30B-A3B Q4_K_M in 14 GB of an RTX 4090 (PCIe 4), time stretched 4 times, and a single stream."""
    loads = {
        "conversation x4": read_trace(traces / "azure_conv.csv", 80, 4.0),
        "code x4": read_trace(traces / "azure_code.csv", 80, 4.0),
        "single stream": [TraceRequest(0.0, 118, 512)],
    }
    found: dict[str, Result | None] = {}
    for load, trace in loads.items():
        for name, more in TRACE_POLICIES.items():
            settings = Settings(**{"memory_bytes": int(14e9), "card": card_named("rtx4090")} | more)
            found[f"{load}, {name}"] = run("qwen3-30b-a3b", "q4_k_m", trace, settings)
    return found


def heldout(traces: Path) -> dict[str, Result | None]:
    """Later rows of the Azure traces at another stretch, Mooncake's shared prefixes, ShareGPT at a rate; other models,
    cards and budgets, another seed of the router."""
    conversation = later(read_trace(traces / "azure_conv.csv", 12060, 8.0), 12000)
    code = later(read_trace(traces / "azure_code.csv", 5060, 8.0), 5000)
    prefixes = read_trace(traces / "mooncake_conversation.jsonl", 30, 20.0)
    answers = read_trace(traces / "sharegpt_lengths.csv", 96, rate=4.0, seed=7)
    loads = {
        "Qwen3-30B, conversation x8, rows from 12,000": ("qwen3-30b-a3b", "q4_k_m", conversation, "rtx4090", 12e9),
        "Qwen3-30B, code x8, rows from 5,000": ("qwen3-30b-a3b", "q4_k_m", code, "rtx4090", 12e9),
        "Qwen3-30B, Mooncake x20": ("qwen3-30b-a3b", "q4_k_m", prefixes, "rtx5090", 20e9),
        "gpt-oss-20b, ShareGPT at 4/s": ("gpt-oss-20b", "q4_k_m", answers, "rtx4090", 9e9),
        "Qwen3.5-35B, ShareGPT at 4/s": ("qwen3.5-35b-a3b", "q4_k_m", answers, "rtx5090", 16e9),
    }
    found: dict[str, Result | None] = {}
    for load, (shape, quant, trace, card, n_bytes) in loads.items():
        for name, more in TRACE_POLICIES.items():
            settings = Settings(**{"memory_bytes": int(n_bytes), "card": card_named(card), "seed": 7} | more)
            found[f"{load}, {name}"] = run(shape, quant, trace, settings)
    return found


def later(trace: list[TraceRequest], first: int) -> list[TraceRequest]:
    """A trace's requests from number `first` on, as if it began with them."""
    start_s = trace[first].arrival_s
    return [dataclasses.replace(request, arrival_s=request.arrival_s - start_s) for request in trace[first:]]


def ablation(traces: Path) -> dict[str, Result | None]:
    """One switch changed at a time, on the conversation trace; as on a card, the device says who is resident."""
    trace = read_trace(traces / "azure_conv.csv", 40, 4.0)
    switches: dict[str, dict[str, Any]] = {
        "all on": {},
        "not elastic": {"policy": "fixed", "resident_experts": 0.5},
        "residency hotset": {"residency": "hotset"},
        "residency recency": {"residency": "recency"},
        "prediction on": {"ways": Ways(prediction=True)},
        "no prefetch": {"ways": Ways(prefetch=False)},
        "no in place": {"ways": Ways(in_place=False)},
        "no fill on read": {"fill_on_read": False},
        "none of prefetch, in place": {"ways": Ways(False, False, False)},
    }
    found: dict[str, Result | None] = {}
    for name, more in switches.items():
        plain: dict[str, Any] = {"memory_bytes": int(14e9), "card": card_named("rtx5090"), "by_device": True}
        settings = Settings(**plain | more)
        found[name] = run("qwen3-30b-a3b", "q4_k_m", trace, settings)
    return found


def value_of(result: Result, key: str) -> float:
    value = result.values[key]
    return (value["mean"] if isinstance(value, dict) else value) * SCALE.get(key, 1.0)


def table(results: dict[str, Result | None]) -> str:
    lines = ["| | " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, result in results.items():
        if result is None:
            cells = ["refuses to start: the experts do not fit", *[""] * (len(COLUMNS) - 1)]
        else:
            cells = [text.format(value_of(result, key)) for _, key, text in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_sensitivity(results: dict[str, Result | None], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(int(name), result.values) for name, result in results.items() if result is not None]
    figure, left = pyplot.subplots(figsize=(7, 4))
    left.plot([n for n, _ in rows], [v["output_tokens_per_second"] for _, v in rows], "o-", color="tab:blue")
    left.set_xlabel("expert-offload-limit (of 1,440 experts)")
    left.set_ylabel("tokens of answers per second", color="tab:blue")
    right = left.twinx()
    right.plot([n for n, _ in rows], [v["steps"] for _, v in rows], "s--", color="tab:orange")
    right.set_ylabel("steps", color="tab:orange")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--only", default="case_study,sensitivity,azure,ablation,heldout")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    args = parser.parse_args()
    studies = {"case_study": case_study, "sensitivity": sensitivity, "azure": azure, "ablation": ablation}
    studies["heldout"] = heldout
    for name in args.only.split(","):
        print(name, flush=True)
        results = studies[name](args.traces)
        values = {key: None if r is None else r.as_dict(timeline=False) for key, r in results.items()}
        (args.out / f"simulate_{name}.json").write_text(json.dumps(values, indent=1) + "\n")
        (args.out / f"simulate_{name}.md").write_text(f"# {name}, simulated\n\n{table(results)}\n")
        try:
            if name == "sensitivity":
                plot_sensitivity(results, args.out / "simulate_sensitivity.png")
            elif name == "case_study":
                shown = {key: r for key, r in results.items() if r is not None and key.startswith("PCIe 5, reserve")}
                pages = {"expert": 5767168, "kv": 5767168}
                write_plot(shown, pages, args.out / "simulate_case_study.png")
        except ImportError:
            print("matplotlib is not installed: no plot")


if __name__ == "__main__":
    main()
