#!/usr/bin/env python3
"""Soak: a server on a small model under everything that clients do wrong, for as long as you like.

    python tools/soak.py --minutes 30 --clients 64 [--arch qwen3moe] [--serve "OPTIONS"] [--out FILE]

Clients send prompts of random lengths, streamed or not, leave at every stage, read slowly, send broken bodies, ask for
too much; the pool is resized all the while. With `--serve "--memory 12MiB --policy paper --swap 8MiB"` answers give way
to each other, by recompute or through host memory. It fails if the server answers with an error that its client did not
cause, if a greedy answer differs from its solo run, if a page, host memory or a request is left at the end, if
a step failed, or if the server's memory has grown after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_random_gguf import write_random_model

N_PROMPTS = 40
BROKEN = (b"", b"{", b"[]", b'{"prompt": 3.5}', b'{"prompt": "x", "n": -1}', b"\xff" * 50, b'{"prompt": ' + b"[" * 3000)
REPORTED = {
    "requests_total", "prompt_tokens_total", "cached_prompt_tokens_total", "output_tokens_total", "engine_steps_total",
    "preemptions_total", "swap_moved_bytes_total", "adjuster_decisions_total", "expert_read_bytes_total",
}  # fmt: skip
SHORT_MINUTES = 5.0
"""Shorter runs say nothing about growth: everything is used for the first time."""
GROWTH_LIMIT = 1.10
"""Resident memory at the end over that after a quarter of the time."""


class Soak:
    """One run. Counters: what was sent, and what came back."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self.args = url, args
        self.sent: Counter[str] = Counter()
        self.faults: list[str] = []
        self.counters: dict[str, float] = {}
        """Of the server's /metrics, at the end."""
        rng = random.Random(args.seed)
        letters = "abcdefgh ijklmnop. "
        self.prompts = ["".join(rng.choices(letters, k=rng.randrange(1, 700))) for _ in range(N_PROMPTS)]
        self.lengths = [rng.randrange(1, rng.choice([60, 60, 60, 400])) for _ in range(N_PROMPTS)]
        self.solo: list[str] = []
        self.end = 0.0

    def body(self, number: int, **more: Any) -> dict[str, Any]:
        n_tokens = self.lengths[number]
        return {
            "prompt": self.prompts[number], "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True, **more
        }  # fmt: skip

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            for number in range(N_PROMPTS):
                reply = await client.post("/v1/completions", json=self.body(number))
                self.solo.append(reply.json()["choices"][0]["text"])
            self.end = time.monotonic() + self.args.minutes * 60
            clients = [self._client(client, random.Random(f"{self.args.seed}/{i}")) for i in range(self.args.clients)]
            await asyncio.gather(self._resizer(client), *clients)
            await self._check_end(client)

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        acts = (self._whole, self._whole, self._streamed, self._streamed, self._slow, self._leave, self._leave)
        acts += (self._broken, self._too_much, self._sampled, self._structured)
        while time.monotonic() < self.end:
            act = rng.choice(acts)
            self.sent[act.__name__.strip("_")] += 1
            try:
                await act(client, rng)
            except Exception as error:
                self._fault(f"{act.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(rng.random() * 0.05)

    def _fault(self, text: str) -> None:
        if len(self.faults) < 200:
            self.faults.append(text)

    def _check(self, number: int, text: str, what: str) -> None:
        if text != self.solo[number]:
            self._fault(f"{what}: the answer to prompt {number} differs from its solo run")

    async def _whole(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        number = rng.randrange(N_PROMPTS)
        reply = await client.post("/v1/completions", json=self.body(number))
        if reply.status_code != 200:
            self._fault(f"whole: {reply.status_code} {reply.text[:200]}")
        else:
            self._check(number, reply.json()["choices"][0]["text"], "whole")

    async def _read_stream(self, client: httpx.AsyncClient, number: int, pause_s: float) -> None:
        text, done = "", False
        async with client.stream("POST", "/v1/completions", json=self.body(number, stream=True)) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event or not event["choices"]:
                        self._fault(f"stream: {line[:200]}")
                        return
                    text += event["choices"][0]["text"]
                done |= line == "data: [DONE]"
                if pause_s:
                    await asyncio.sleep(pause_s)
        if not done:
            self._fault("stream: cut off")
        self._check(number, text, "stream")

    async def _streamed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        await self._read_stream(client, rng.randrange(N_PROMPTS), 0.0)

    async def _slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        await self._read_stream(client, rng.randrange(N_PROMPTS), 0.05)

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """Close the connection at a random moment: at once, in the queue, in prefill, in decode."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        more = {"stream": rng.random() < 0.5, "n": rng.randrange(1, 4), "max_tokens": 200}
        data = json.dumps(self.body(rng.randrange(N_PROMPTS), **more)).encode()
        if rng.random() < 0.1:
            data = data[: len(data) // 2]  # and sometimes before the body is complete
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data) + rng.randrange(2)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        await asyncio.sleep(rng.choice([0, 0.01, 0.1, 0.5, 2]))
        writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def _broken(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        reply = await client.post(rng.choice(["/v1/completions", "/v1/chat/completions"]), content=rng.choice(BROKEN))
        if not 400 <= reply.status_code < 500:
            self._fault(f"broken body: {reply.status_code}")

    async def _too_much(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "word " * 200_000, "max_tokens": 1})
        if reply.status_code != 400 or reply.json()["error"]["code"] != "context_length_exceeded":
            self._fault(f"too long: {reply.status_code} {reply.text[:200]}")

    async def _sampled(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        options = {"temperature": rng.choice([1e-5, 0.7, 3]), "top_p": rng.random(), "top_k": rng.randrange(200)}
        body = self.body(rng.randrange(N_PROMPTS), n=2, logprobs=3, stop=["e", "ab"], repetition_penalty=1.2, **options)
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200 or "ab" in reply.json()["choices"][0]["text"]:
            self._fault(f"sampled: {reply.status_code} {reply.text[:200]}")

    async def _structured(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A chat whose answer a grammar holds to a schema."""
        wanted = {"kind": {"enum": ["a", "bc", "def"]}, "is_it": {"type": "boolean"}}
        schema = {"type": "object", "properties": wanted, "required": list(wanted), "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": self.prompts[rng.randrange(N_PROMPTS)]}]
        body = {"messages": messages, "response_format": form, "max_tokens": 200, "temperature": rng.choice([0, 1])}
        reply = await client.post("/v1/chat/completions", json=body)
        choice = reply.json()["choices"][0] if reply.status_code == 200 else None
        if choice is None or (
            choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"]).keys() != wanted.keys()
        ):
            self._fault(f"structured: {reply.status_code} {reply.text[:300]}")

    async def _resizer(self, client: httpx.AsyncClient) -> None:
        """Shrinks and grows the pool. A size that cannot be had is an answer, not a fault."""
        rng = random.Random(self.args.seed + 1)
        total = (await client.get("/v1/memory")).json()["total_bytes"]
        while time.monotonic() < self.end:
            await asyncio.sleep(2 + 5 * rng.random())
            reply = await client.post("/v1/memory/resize", json={"memory": int(total * rng.uniform(0.75, 1.0))})
            self.sent[f"resize {reply.status_code}"] += 1
            if reply.status_code not in (200, 400, 503):
                self._fault(f"resize: {reply.status_code} {reply.text[:200]}")
            for path in ("/v1/dashboard", "/metrics", "/health"):
                if (await client.get(path)).status_code != 200:
                    self._fault(f"{path} failed")
        await client.post("/v1/memory/resize", json={"memory": total})

    async def _check_end(self, client: httpx.AsyncClient) -> None:
        """Idle within seconds, no page held by a request, no step failed, and an answer as on the first day."""
        for _ in range(100):
            await asyncio.sleep(0.1)
            memory = (await client.get("/v1/memory")).json()
            if not memory["requests"]:
                break
        held = memory["views"]["kv"]["pages"] - memory["cached_pages"]
        if memory["requests"] or held:
            self._fault(f"at the end {len(memory['requests'])} requests and {held} KV pages are left")
        await self._whole(client, random.Random(0))
        found = re.findall(r"^rimuru_(\w+)(?:\{\w+=\"(\w+)\"\})? (\S+)$", (await client.get("/metrics")).text, re.M)
        values = {f"{name} {label}".strip(): float(value) for name, label, value in found}
        self.counters = {key: value for key, value in values.items() if key.split()[0] in REPORTED}
        if values["engine_failed_steps_total"] > 0:
            self._fault("steps of the engine failed; see the server's log")
        if values["swap_bytes"] or values["swapped_requests"]:
            self._fault(f"{values['swap_bytes']:.0f} bytes of host memory are left with answers that are over")


def watch_memory(process: psutil.Process, seen: list[int]) -> None:
    seen.append(process.memory_info().rss)


async def soak(url: str, args: argparse.Namespace, pid: int) -> tuple[Soak, list[int]]:
    """Run the clients and sample the server's resident memory once a second."""
    run, process, seen = Soak(url, args), psutil.Process(pid), []
    work = asyncio.ensure_future(run.run())
    while not work.done():
        watch_memory(process, seen)
        await asyncio.wait({work}, timeout=1.0)
    work.result()
    return run, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--arch", default="qwen3moe")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of `rimuru serve`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the figures as JSON to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "soak.gguf", args.arch, context_length=2048)
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "rimuru", "serve", str(model), "--port", "0", "--device", "cpu"]
        with log.open("w") as file:
            command += ["--threads", str(args.threads), *args.serve.split()]
            server = subprocess.Popen(command, stderr=file, stdout=file)
        try:
            while (ready := re.search(r"ready: (http://\S+)/v1", log.read_text())) is None:
                if server.poll() is not None:
                    print(log.read_text(), file=sys.stderr)
                    return 1
                time.sleep(0.1)
            run, memory = asyncio.run(soak(ready.group(1), args, server.pid))
            server.terminate()
            exit_code = server.wait(60)
        finally:
            server.kill()
        quarter, last = memory[len(memory) // 4], memory[-1]
        if args.minutes >= SHORT_MINUTES and last > quarter * GROWTH_LIMIT:
            run.faults.append(f"the server's memory grew from {quarter >> 20} to {last >> 20} MiB")
        if exit_code != 0 or "Traceback" in log.read_text():
            run.faults.append(f"the server ended with {exit_code}, or logged a traceback")
            print(log.read_text()[-5000:], file=sys.stderr)
    figures = {
        "minutes": args.minutes, "clients": args.clients, "arch": args.arch, "serve": args.serve,
        "sent": dict(run.sent), "server": run.counters,
        "rss_mib": {"first": memory[0] >> 20, "quarter": quarter >> 20, "last": last >> 20, "most": max(memory) >> 20},
        "faults": run.faults,
    }  # fmt: skip
    print(json.dumps(figures, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if run.faults else 0


if __name__ == "__main__":
    sys.exit(main())
