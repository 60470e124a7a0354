"""Decode of one stream with a part of the experts in host memory: time per token against the bytes that had to come.

    python tools/bench/host_experts.py MODEL [--shares 1.0,0.75,0.5,0.25] [--ways "in place,buffers,places"] [--new 64]
                                             [--link-gbps 51] [--json FILE]

The first share must be 1.0: its time per token is the resident time, and all others must give its tokens. Predicted is
resident time + missed bytes / the link's rate. Exit status 1 where a time is over 15% above that, or tokens differ.

    in place  kernels read what is missed where it lies in host memory. What the tokens chose outside the pool is noted
              in a second run of the same requests, without graphs and off the clock; "counted" is the device's count
    buffers   what is missed comes into loading buffers for a layer's turn; who is resident does not change
    places    what is missed takes the places of others: what engines do where host memory holds all experts

Where the device brings experts in, it does so before they are computed, and what it counted in the timed run counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rimuru import LLM, SamplingParams
from rimuru.experts import device_places
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.ways import WayTuner
from rimuru.request import Sequence

PROMPT_TOKENS = 64
MOST_OVER = 0.15
WAYS = ("in place", "buffers", "places")


class Misses:
    """Bytes of the experts that decode steps of one token chose outside the pool."""

    def __init__(self, llm: LLM) -> None:
        loaded = llm.loaded
        assert isinstance(loaded.store, DeviceExpertStore), "a model with experts on a device"
        assert loaded.layout.expert is not None
        self._ops, self._layers = loaded.ops, loaded.layout.expert.layers
        self._first, self._end = loaded.pool_memory.base, loaded.pool_memory.base + loaded.pool_memory.mapped_bytes
        self._tables = loaded.store.tables
        self.step_bytes: list[int] = []
        self.step_experts: list[int] = []

    def chosen(self, layer_slot: int, ids: Any) -> None:
        """See RoutingTap: before the layer's experts are read."""
        if ids.shape[0] != 1:
            return
        if layer_slot == 0:
            self.step_bytes.append(0)
            self.step_experts.append(0)
        addresses = self._ops.download(self._tables[layer_slot].addresses)[np.unique(self._ops.download(ids))]
        inside = (addresses >= self._first) & (addresses < self._end)
        missed = int(np.count_nonzero(~inside.all(axis=1)))
        self.step_bytes[-1] += missed * self._layers[layer_slot].useful_bytes
        self.step_experts[-1] += missed


def requests(llm: LLM, n_new: int, n_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Random prompts and seeded draws: the same ones on every call."""
    rng = np.random.default_rng(7)
    n_vocab = llm.loaded.engine.n_vocab
    return [
        (
            rng.integers(0, n_vocab, PROMPT_TOKENS).tolist(),
            SamplingParams(max_tokens=n_new, temperature=1.0, ignore_eos=True, seed=i),
        )
        for i in range(n_requests)
    ]


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Sequence, float, float]:
    """(the finished sequence, seconds and counted missed bytes per token after its first)."""
    engine, store = llm.loaded.engine, llm.loaded.store
    assert isinstance(store, DeviceExpertStore)
    sequence = engine.add(prompt, params)
    while sequence.n_output == 0:
        engine.step()
    store.catch_up()
    n_bytes, done, started = store.counters.read_bytes, sequence.n_output, time.perf_counter()
    engine.run_until([sequence])
    seconds, n_tokens = time.perf_counter() - started, sequence.n_output - done
    store.catch_up()
    return sequence, seconds / n_tokens, (store.counters.read_bytes - n_bytes) / n_tokens


def without_graphs(llm: LLM) -> Any:
    """Decode steps are launched one kernel after another, so that the routing tap sees them."""
    if not hasattr(llm.loaded.ops, "graphs"):  # a host backend never does anything else
        return nullcontext()
    from rimuru.ops.cuda.graphs import block_bucket, bucket_of, pad_decode

    ops: Any = llm.loaded.ops

    def run(batch: Any, forward: Any) -> Any:
        return forward(ops.stage(pad_decode(batch, bucket_of(batch.n_seqs), block_bucket(batch.kv_pages.shape[2]))))

    return patch.object(ops.graphs, "run", run)


def plainest(tuner: WayTuner, n_tokens: int, link_s: float) -> str:
    """Stands for WayTuner.choose: what a single stream begins with, and no trial of another way in so short a run."""
    return tuner.ways[0]


def measure(llm: LLM, n_new: int, n_requests: int, way: str) -> dict[str, Any]:
    """Time per token, missed bytes per token, and the tokens of the same requests."""
    work = requests(llm, n_new, n_requests)
    most = 0 if way == "buffers" else device_places.MAX_COMERS
    with patch.object(device_places, "MAX_COMERS", most), patch.object(WayTuner, "choose", plainest):
        answer(llm, *work[0])  # kernels, graphs
        timed = [answer(llm, *request) for request in work]
    tokens = [sequence.output_ids for sequence, _, _ in timed]
    counted = statistics.fmean(n_bytes for _, _, n_bytes in timed)
    row = {
        "way": way,
        "resident_experts": sum(llm.memory()["resident_experts"]),
        "ms_per_token": statistics.median(seconds for _, seconds, _ in timed) * 1e3,
        "missed_bytes_per_token": counted,
        "counted_bytes_per_token": counted,
        "tokens": tokens,
        "same_tokens": True,
        "load_s": llm.loaded.load_s,
    }
    if way == "in place":
        tap, misses = llm.loaded.engine.runner.model.tap, Misses(llm)
        tap.chosen = misses.chosen
        with without_graphs(llm):
            noted = [answer(llm, *request)[0].output_ids for request in work]
        tap.chosen = None
        row["same_tokens"] = noted == tokens
        row["missed_bytes_per_token"] = statistics.fmean(misses.step_bytes)
        row["missed_experts_per_token"] = statistics.fmean(misses.step_experts)
    return row


class Stages:
    """Seconds since the start at which each stage of loading was first and last heard of."""

    def __init__(self) -> None:
        self._started, self.seconds = time.perf_counter(), dict[str, list[float]]()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter() - self._started
        self.seconds.setdefault(stage, [now, now])[1] = now


def show(row: dict[str, Any]) -> None:
    figures = f"{row['ms_per_token']:>12.3f}{row['missed_bytes_per_token'] / 1e6:>11.1f}"
    more = f"{row['counted_bytes_per_token'] / 1e6:>9.1f}{row['predicted_ms']:>14.3f}{row['over']:>+8.1%}"
    other = "" if row["same_tokens"] else "  OTHER TOKENS"
    print(f"{row['share']:>8.2f}{row['way']:>10}{row['load_s']:>8.1f}{figures}{more}{other}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shares", default="1.0,0.75,0.5,0.25", help="shares of the experts in the pool")
    parser.add_argument("--ways", default=",".join(WAYS), help="how missed experts are read")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--link-gbps", type=float, default=51.0, help="GB/s at which kernels read host memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ram", default="40GB", help="host memory that experts may take")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    shares = [float(share) for share in options.shares.split(",")]
    ways = options.ways.split(",")
    if shares[0] != 1.0 or not ways or set(ways) - set(WAYS):
        parser.error(f"the first share must be 1.0, and the ways some of: {', '.join(WAYS)}")
    rows: list[dict[str, Any]] = []
    print(
        f"{'in pool':>8}{'way':>10}{'load s':>8}{'ms a token':>12}{'missed MB':>11}{'counted':>9}{'predicted ms':>14}"
        f"{'over':>8}"
    )
    for share in shares:
        some = ways[:1] if share == 1.0 else ways
        # One load serves the ways in which the device brings experts; places come last, since they change residents.
        for fills in (False, True):
            group = [way for way in some if (way != "in place") == fills]
            if not group:
                continue
            stages = Stages()
            with LLM(
                options.model, device=options.device, resident_experts=share, max_sequences=1, context=1024,
                prefix_cache=False, fill_on_read=fills, ram=options.ram, progress=stages,
            ) as llm:  # fmt: skip
                for way in sorted(group, key=WAYS.index):
                    row = measure(llm, options.new, options.requests, way)
                    resident_ms = rows[0]["ms_per_token"] if rows else row["ms_per_token"]
                    row["share"], row["load_stages_s"] = share, stages.seconds
                    row["predicted_ms"] = resident_ms + row["missed_bytes_per_token"] / options.link_gbps / 1e6
                    row["over"] = row["ms_per_token"] / row["predicted_ms"] - 1
                    row["same_tokens"] &= not rows or row["tokens"] == rows[0]["tokens"]
                    rows.append(row)
                    show(row)
        if options.json:
            kept = [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
            options.json.write_text(json.dumps({"link_gbps": options.link_gbps, "rows": kept}, indent=1) + "\n")
    return 0 if all(row["over"] <= MOST_OVER and row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
