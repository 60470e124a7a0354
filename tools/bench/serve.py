#!/usr/bin/env python3
"""Replays a request trace against any OpenAI address, ours or another server's, at the trace's own arrival times.

    python tools/bench/serve.py --url http://127.0.0.1:8080/v1 --trace ../shared/traces/azure_conv.csv --requests 200 \
        --stretch 20 --json

Prompts are common words (about one token each; what the server counted is reported), blocks with the same hash id in
the trace are the same words, so that prefixes are shared as they were. Fields that a server refuses are left out, as
short requests find out before: `ignore_eos` (answers may then end early), `stream_options` (chunks are then counted).
The model is the server's first one unless it is named. Times: to the first token (TTFT) from sending, per token after
it (TPOT); mean, p50, p95.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.simulate.traces import PREFIX_BLOCK_TOKENS, TraceRequest, read_trace

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power""".split()  # noqa: SIM905


EXTRAS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass(slots=True)
class Outcome:
    """What one request came to; times in seconds after it was sent."""

    late_s: float
    error: str | None = None
    first_s: float | None = None
    end_s: float = 0.0
    n_chunks: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0

    @property
    def tpot_s(self) -> float | None:
        n_output = self.n_output or self.n_chunks
        if self.first_s is None or n_output < 2:
            return None
        return (self.end_s - self.first_s) / (n_output - 1)


def prompt_text(request: TraceRequest, number: int, n_tokens: int, seed: int) -> str:
    """Words for a prompt; the blocks that the trace shares are shared."""
    words: list[str] = []
    for block in request.prefix:
        rng = random.Random(f"{seed}/{block}")
        words += rng.choices(WORDS, k=PREFIX_BLOCK_TOKENS)
    rng = random.Random(f"{seed}/request {number}")
    words = words[:n_tokens] + rng.choices(WORDS, k=max(0, n_tokens - len(words)))
    return " ".join(words)


class Replay:
    """Sends the requests of a trace when their time has come, whether or not earlier ones have ended."""

    def __init__(self, args: argparse.Namespace, requests: list[TraceRequest]) -> None:
        self.args, self.requests = args, requests
        self.path = "chat/completions" if args.chat else "completions"
        self.extras: dict[str, Any] = dict(EXTRAS)
        """What is sent beyond the fields that every server knows."""
        self.model: str = args.model or "any"
        self.n_open = self.most_open = 0

    async def run(self) -> tuple[list[Outcome], float]:
        """(outcomes in order, seconds from the first request to the last answer)."""
        headers = {"Authorization": f"Bearer {self.args.api_key}"} if self.args.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(headers=headers, timeout=self.args.timeout, limits=limits) as client:
            await self._get_to_know(client)
            started = time.perf_counter()
            tasks = [asyncio.ensure_future(self._send(client, i, r, started)) for i, r in enumerate(self.requests)]
            return list(await asyncio.gather(*tasks)), time.perf_counter() - started

    async def _get_to_know(self, client: httpx.AsyncClient) -> None:
        """The server's model, and which of EXTRAS it takes."""
        url = self.args.url.rstrip("/")
        if not self.args.model:
            reply = await client.get(f"{url}/models")
            if reply.status_code == 200 and reply.json().get("data"):
                self.model = reply.json()["data"][0]["id"]
        for name in EXTRAS:
            body = self._body("hello", 1) | {"stream": False, name: EXTRAS[name]}
            body = {key: value for key, value in body.items() if key == name or key not in EXTRAS}
            if name == "stream_options":  # only allowed in streams
                body["stream"] = True
            reply = await client.post(f"{url}/{self.path}", json=body)
            if reply.status_code in (400, 422):
                del self.extras[name]

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": prompt}]} if self.args.chat else {"prompt": prompt}
        return {"model": self.model, **text, "max_tokens": max_tokens, "temperature": 0, "stream": True, **self.extras}

    async def _send(self, client: httpx.AsyncClient, number: int, request: TraceRequest, started: float) -> Outcome:
        n_prompt = min(request.n_prompt, self.args.max_prompt)
        prompt = prompt_text(request, number, n_prompt, self.args.seed)
        body = self._body(prompt, min(request.n_output, self.args.max_output))
        await asyncio.sleep(max(0.0, started + request.arrival_s - time.perf_counter()))
        sent = time.perf_counter()
        outcome = Outcome(late_s=sent - started - request.arrival_s)
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            async with client.stream("POST", f"{self.args.url.rstrip('/')}/{self.path}", json=body) as reply:
                if reply.status_code != 200:
                    outcome.error = refusal(reply.status_code, await reply.aread())
                else:
                    await self._read(reply, outcome, sent)
        except httpx.HTTPError as error:
            outcome.error = type(error).__name__
        self.n_open -= 1
        outcome.end_s = time.perf_counter() - sent
        return outcome

    async def _read(self, reply: httpx.Response, outcome: Outcome, sent: float) -> None:
        ended = False
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.error = str(event["error"].get("code"))
                    return
                if event.get("usage"):
                    usage = event["usage"]
                    outcome.n_prompt, outcome.n_output = usage["prompt_tokens"], usage["completion_tokens"]
                    outcome.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if event.get("choices") and text_of(event["choices"][0]):
                    outcome.n_chunks += 1
                    if outcome.first_s is None:
                        outcome.first_s = time.perf_counter() - sent
        if not ended:
            outcome.error = "cut off"


def refusal(status: int, body: bytes) -> str:
    """The status, and the reason that an OpenAI error body gives, in one line."""
    try:
        error = json.loads(body)["error"]
        reason = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        reason = body.decode("utf-8", "replace")
    reason = " ".join(reason.split())[:200]
    return f"HTTP {status}: {reason}" if reason else f"HTTP {status}"


def text_of(choice: dict[str, Any]) -> str:
    """New text of a chunk, of a completion or a chat (thoughts count)."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean, median and 95th percentile; None without values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "p50": float(np.percentile(values, 50)),
        "p95": float(np.percentile(values, 95)),
    }


def report(replay: Replay, outcomes: list[Outcome], total_s: float) -> dict[str, Any]:
    """The figures of a replay."""
    args = replay.args
    good = [o for o in outcomes if o.error is None]
    n_output = sum(o.n_output or o.n_chunks for o in good)
    return {
        "url": args.url,
        "model": replay.model,
        "fields": sorted(replay.extras),
        "trace": args.trace,
        "requests": len(outcomes),
        "stretch": args.stretch,
        "max_prompt": args.max_prompt,
        "max_output": args.max_output,
        "seconds": total_s,
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "prompt_tokens": sum(o.n_prompt for o in good),
        "cached_tokens": sum(o.n_cached for o in good),
        "output_tokens": n_output,
        "requests_per_second": len(good) / total_s,
        "output_tokens_per_second": n_output / total_s,
        "peak_concurrency": replay.most_open,
        "ttft_s": spread([o.first_s for o in good if o.first_s is not None]),
        "tpot_s": spread([o.tpot_s for o in good if o.tpot_s is not None]),
        "request_s": spread([o.end_s for o in good]),
        "worst_late_s": max(o.late_s for o in outcomes),
    }


def table(figures: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{figures['requests']} requests in {figures['seconds']:.1f} s, at most {figures['peak_concurrency']} at once; "
        f"errors: {figures['errors'] or 'none'}",
        f"{figures['output_tokens_per_second']:.1f} output tokens/s, {figures['requests_per_second']:.2f} requests/s; "
        f"{figures['prompt_tokens']} prompt tokens, {figures['cached_tokens']} of them reused",
    ]
    for name, key in (("first token", "ttft_s"), ("per token", "tpot_s"), ("request", "request_s")):
        if figures[key]:
            mean, p50, p95 = (figures[key][part] * 1e3 for part in ("mean", "p50", "p95"))
            lines.append(f"{name:12} mean {mean:9.1f} ms   p50 {p50:9.1f} ms   p95 {p95:9.1f} ms")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--stretch", type=float, default=1.0, help="arrival times are multiplied by this")
    parser.add_argument("--rate", type=float, help="requests per second (Poisson) for traces without times")
    parser.add_argument("--max-prompt", type=int, default=1 << 30, help="longer prompts are cut to this")
    parser.add_argument("--max-output", type=int, default=1 << 30, help="longer answers are cut to this")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a chat of one turn")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    replay = Replay(args, read_trace(args.trace, args.requests, args.stretch, args.rate, args.seed))
    try:
        outcomes, total_s = asyncio.run(replay.run())
    except (httpx.HTTPError, httpx.InvalidURL) as error:  # before the first request of the trace
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"serve.py: no server answers at {args.url}: {reason}", file=sys.stderr)
        return 2
    figures = report(replay, outcomes, total_s)
    print(json.dumps(figures, indent=2) if args.json else table(figures))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
