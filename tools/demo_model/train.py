#!/usr/bin/env python3
"""Stage 3: train the demo model.

    tools/demo_model/train.py --data demo_data --state run --out trained --seconds 480 [--dense]

--data is what prepare.py wrote. A checkpoint is written to STATE every minute; started again with the same STATE, the
run goes on exactly where it was. --seconds is the time of all runs together: the number of steps follows from the speed
of the first ones, unless --steps names it. Learning rate: warm-up, constant, then falling to zero over the last part.
At the end OUT holds the weights as float16 in files below 16 MB (weights-N.npz) and losses.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script

from model import CHUNK, DemoModel, DemoShape

SEED = 7
WARM_UP_STEPS = 300
DECAY_SHARE = 0.4
BALANCE_WEIGHTS, BALANCE_STEPS = (0.01, 0.001), (300, 1000)
"""The weight of the balance loss up to the first of these steps and from the second on: enough that no expert is lost
while the routers are still random, then little, so that they become as skewed as the text makes them."""
TIMED_STEPS = (20, 60)
"""The speed is measured between these steps."""
SECOND_LOOK = 0.55
"""Of the planned steps: here the number of steps is settled by the speed so far. The rate does not fall before that."""
TIME_SHARE = 0.93
"""Of --seconds, for steps: the rest is for evaluation, checkpoints and a slower machine."""
CHECKPOINT_S = 60.0
FILE_BYTES = 15_000_000


class Corpus:
    """Documents of token ids, each with the number of its source; [documents | held-out documents]."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "corpus.json").read_text())
        raw = b"".join(lzma.decompress(path.read_bytes()) for path in sorted(folder.glob("tokens-*.xz")))
        self.ids = np.frombuffer(raw, "<u2")
        index = np.load(folder / "documents.npz")
        self.ends, self.sources = np.cumsum(index["lengths"].astype(np.int64)), index["sources"]
        self.starts = self.ends - index["lengths"]
        self.held_out = index["held_out"]
        self.source_names: list[str] = about["sources"]
        self.n_vocab: int = about["n_vocab"]

    def rows(self, documents: np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens that begin where a document begins; what a row's last document has beyond is left
        out."""
        rows, parts, room = [], [], length
        for start, end in zip(self.starts[documents], self.ends[documents], strict=True):
            parts.append(self.ids[start : min(end, start + room)])
            room -= len(parts[-1])
            if room == 0:
                rows.append(np.concatenate(parts))
                parts, room = [], length
        return np.stack(rows) if rows else np.empty((0, length), np.uint16)

    def epoch(self, number: int, length: int) -> np.ndarray:
        """All training documents in an order of their own for each epoch, as rows."""
        order = np.random.default_rng([SEED, number]).permutation(np.flatnonzero(~self.held_out))
        return self.rows(order, length)

    def held_out_rows(self, source: int, length: int, limit: int) -> np.ndarray:
        """The first rows of a source's held-out documents."""
        return self.rows(np.flatnonzero(self.held_out & (self.sources == source)), length)[:limit]


class Batches:
    """Batches in a fixed order, from any step on."""

    def __init__(self, corpus: Corpus, n_rows: int, length: int, device: torch.device) -> None:
        self.corpus, self.n_rows, self.length, self.device = corpus, n_rows, length, device

    def from_step(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids, targets) [n_rows, length] of step, step + 1, ..."""
        epoch, done = 0, 0
        while True:
            rows = self.corpus.epoch(epoch, self.length + 1)
            n = len(rows) // self.n_rows
            if n == 0:
                raise ValueError(f"{len(rows)} rows of {self.length} tokens are too few for batches of {self.n_rows}")
            if step < done + n:
                on_device = torch.from_numpy(rows.astype(np.int32)).to(self.device)
                for i in range(max(0, step - done), n):
                    batch = on_device[i * self.n_rows : (i + 1) * self.n_rows].long()
                    yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            epoch, done = epoch + 1, done + n


def optimizer_of(model: DemoModel, rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices only, the embedding left out."""
    decayed = [p for name, p in model.tensors.items() if p.ndim > 1 and "embd" not in name and "conv" not in name]
    kept = {id(p) for p in decayed}
    others = [p for p in model.tensors.values() if id(p) not in kept]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-9, fused=next(model.parameters()).is_cuda)


def rate_at(step: int, total: int) -> float:
    """Share of the highest learning rate."""
    left = (total - step) / max(1.0, DECAY_SHARE * total)
    return min(1.0, (step + 1) / WARM_UP_STEPS, left)


def balance_weight(step: int) -> float:
    (high, low), (start, end) = BALANCE_WEIGHTS, BALANCE_STEPS
    return high + (low - high) * min(1.0, max(0.0, (step - start) / (end - start)))


class Run:
    """A training run and everything a checkpoint holds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.corpus = Corpus(options.data)
        sizes: dict[str, Any] = json.loads(options.shape) if options.shape else {}
        if options.dense:
            sizes["n_experts"] = 0
        self.shape = DemoShape(n_vocab=self.corpus.n_vocab, **sizes)
        self.model = DemoModel(self.shape, SEED).to(self.device)
        self.optimizer = optimizer_of(self.model, options.rate)
        self.step, self.total, self.seconds = 0, options.steps, 0.0
        self.log: list[dict[str, Any]] = []
        options.state.mkdir(parents=True, exist_ok=True)
        self.path = options.state / ("dense.pt" if options.dense else "moe.pt")
        if self.path.exists():
            self.restore()
        if options.compile:
            self.model.compile_layers()

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        state |= {"total": self.total, "seconds": self.seconds, "log": self.log}
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def restore(self) -> None:
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        if state["total"] is None:  # from before the steps were planned: not worth going on from
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.total, self.seconds, self.log = (state[k] for k in ("step", "total", "seconds", "log"))
        print(f"going on at step {self.step} of {self.total}", flush=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self) -> None:
        """Steps until the last one or until the time is over."""
        options, began, before = self.options, time.monotonic(), self.seconds
        saved_s, timed, second, losses = began, (0, began), 0, []
        batches = Batches(self.corpus, options.rows, options.length, self.device).from_step(self.step)
        while self.total is None or self.step < self.total:
            loss = self.one_step(*next(batches))
            losses.append(loss)
            if options.steps is None and self.step in (*TIMED_STEPS, second):
                self.synchronize()
                now = time.monotonic()
                if self.step > TIMED_STEPS[0] and timed[0]:
                    self.plan(now - began + before, (now - timed[1]) / (self.step - timed[0]))
                    second = int(SECOND_LOOK * self.total) if not second else 0
                timed = self.step, now
            if self.step % options.log_every == 0:
                self.report(losses, before + time.monotonic() - began)
                losses = []
            if self.step % options.evaluate_every == 0:
                self.evaluate()
            now = time.monotonic()
            self.seconds = before + now - began
            if now > saved_s + CHECKPOINT_S:
                self.save()
                saved_s = time.monotonic()
            if self.seconds > options.seconds or self.step >= options.stop_at:
                break
        self.synchronize()
        self.seconds = before + time.monotonic() - began
        self.save()

    def plan(self, seconds_so_far: float, step_s: float) -> None:
        """Settle the number of steps from the time that is left."""
        left_s = self.options.seconds * TIME_SHARE - seconds_so_far
        first = math.ceil(self.step / (1 - DECAY_SHARE)) if self.total else 0  # the rate has not begun to fall
        self.total = max(first, self.step + max(50, int(left_s / step_s)))
        n_tokens = self.options.rows * self.options.length
        print(f"{step_s * 1e3:.1f} ms a step, {n_tokens / step_s:,.0f} tokens/s: {self.total} steps", flush=True)
        (self.options.state / "steps.txt").write_text(f"{self.total}\n")  # for a twin that is to see the same tokens

    def one_step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        share = rate_at(self.step, self.total) if self.total is not None else (self.step + 1) / WARM_UP_STEPS
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * share
        loss, balance = self.model.loss(ids, targets)
        (loss + balance_weight(self.step) * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack([loss.detach(), balance.detach()])

    def report(self, losses: list[torch.Tensor], seconds: float) -> None:
        loss, balance = torch.stack(losses).mean(0).tolist()
        n_tokens = self.step * self.options.rows * self.options.length
        self.log.append({"step": self.step, "tokens": n_tokens, "seconds": round(seconds, 1), "loss": round(loss, 4)})
        self.log[-1]["balance"] = round(balance, 3)
        print(json.dumps(self.log[-1]), flush=True)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}")

    def evaluate(self) -> dict[str, float]:
        """Mean cross entropy of held-out rows, by source. With gradients enabled, so that nothing is compiled anew."""
        found = {}
        for number, name in enumerate(self.corpus.source_names):
            rows = self.corpus.held_out_rows(number, self.options.length + 1, 4 * self.options.rows).astype(np.int64)
            total, n = 0.0, 0
            for start in range(0, len(rows), self.options.rows):
                part = rows[start : start + self.options.rows]
                batch = torch.zeros(self.options.rows, self.options.length + 1, dtype=torch.int64, device=self.device)
                batch[: len(part)] = torch.from_numpy(part).to(self.device)
                targets = batch[:, 1:].clone()
                targets[len(part) :] = -1  # rows that only fill the batch up
                total += self.model.loss(batch[:, :-1].contiguous(), targets)[0].item() * len(part)
                n += len(part)
            if n:
                found[name] = round(total / n, 4)
        self.log.append({"step": self.step, "held_out": found})
        print(json.dumps(self.log[-1]), flush=True)
        return found

    def finish(self) -> None:
        """Weights and losses into OUT."""
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        kind = "dense" if options.dense else "moe"
        held_out = self.evaluate()
        about = {
            "kind": kind,
            "shape": self.shape.__dict__,
            "card": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "planned_steps": self.total,
            "tokens": self.step * options.rows * options.length,
            "tokens_per_step": options.rows * options.length,
            "corpus_tokens": int((self.corpus.ends - self.corpus.starts)[~self.corpus.held_out].sum()),
            "learning_rate": options.rate,
            "seconds": round(self.seconds, 1),
            "held_out": held_out,
            "log": self.log,
        }
        (options.out / f"losses-{kind}.json").write_text(json.dumps(about, indent=1) + "\n")
        if not options.no_weights:
            write_weights(self.model, options.out, kind)


def write_weights(model: DemoModel, folder: Path, kind: str) -> None:
    """The tensors as float16 in files below FILE_BYTES: KIND-0.npz, KIND-1.npz, ..."""
    files: list[dict[str, np.ndarray]] = [{}]
    room = FILE_BYTES
    for name, tensor in model.gguf_tensors().items():
        values = tensor.detach().float().cpu().numpy()
        stored = values if values.ndim == 1 or "conv" in name else values.astype(np.float16)
        if stored.nbytes > room and files[-1]:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = stored
        room -= stored.nbytes
    for i, tensors in enumerate(files):
        np.savez(folder / f"{kind}-{i}.npz", **tensors)  # type: ignore[arg-type]


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480, help="time of all runs of this STATE together")
    parser.add_argument("--steps", type=int, help="number of steps; default: what fits in --seconds")
    parser.add_argument("--stop-at", type=int, default=1 << 60, help="stop after this step, to go on later")
    parser.add_argument("--dense", action="store_true", help="the dense model of the same active size")
    parser.add_argument("--rows", type=int, default=96, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--shape", default="", help="sizes other than the demo's, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-weights", action="store_true")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=500)
    options = parser.parse_args(arguments)
    if options.length % CHUNK:
        parser.error(f"--length must be a multiple of {CHUNK}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    torch.set_float32_matmul_precision("high")
    run = Run(options)
    run.train()
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
