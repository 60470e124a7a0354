"""A conversation: what each turn computes of its prompt, and how long that takes.

    python tools/bench/conversation.py MODEL [--memory 16GB] [--first 8000] [--turns 12] [--added 58] [--new 40]
                                             [--device auto] [--json FILE]

Random tokens stand for texts: a first prompt, then turns that add `--added` tokens to all that was said before. Then
the last turn is edited, and another conversation begins with the system part of the first prompt. Exit status 1 where a
later turn computes more than its own tokens and the one that ends the answer before; models of attention alone, which
are reused by whole pages, also compute the rest of a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rimuru import LLM, SamplingParams

SYSTEM_SHARE = 1 / 16
"""Of the first prompt: its system part, which ends with a token that ends a turn."""


class Conversations:
    """Asks the engine, and notes what it did with each prompt."""

    def __init__(self, llm: LLM, n_new: int) -> None:
        self.llm, self.n_new, self.rows = llm, n_new, []  # type: ignore[var-annotated]
        self.rng = np.random.default_rng(0)
        eog = sorted(llm.loaded.engine.eog_ids)
        self.end = eog[0] if eog else 0

    def text(self, n_tokens: int) -> list[int]:
        """A turn of n_tokens: the last one ends it, no other does."""
        n_vocab = self.llm.loaded.engine.n_vocab
        others = [
            int(i) for i in self.rng.integers(0, n_vocab, 2 * n_tokens) if i not in self.llm.loaded.engine.eog_ids
        ]
        return [*others[: n_tokens - 1], self.end]

    def ask(self, name: str, prompt: list[int]) -> list[int]:
        """Prompt and answer, closed by the token that ends a turn."""
        engine = self.llm.loaded.engine
        params = SamplingParams(self.n_new, 1.0, seed=1, ignore_eos=True)
        started = time.perf_counter()
        sequence = engine.add(prompt, params)
        while not sequence.n_output and not sequence.is_finished:
            engine.step()
        first_s = time.perf_counter() - started
        engine.run_until([sequence])
        if sequence.error is not None:
            raise sequence.error
        row = {
            "turn": name, "prompt_tokens": len(prompt), "computed_tokens": len(prompt) - sequence.n_reused,
            "first_token_ms": 1e3 * first_s, "total_ms": 1e3 * (time.perf_counter() - started),
        }  # fmt: skip
        self.rows.append(row)
        print(
            f"{name:18} prompt {row['prompt_tokens']:6}  computed {row['computed_tokens']:6}  "
            f"first token after {row['first_token_ms']:8.1f} ms",
            flush=True,
        )
        return [*sequence.tokens, self.end]


def measure(llm: LLM, n_first: int, n_turns: int, n_added: int, n_new: int) -> dict[str, Any]:
    """Rows by turn, and whether every later turn computed its own tokens only."""
    talk = Conversations(llm, n_new)
    talk.ask("(warm up)", talk.text(min(n_first, 200)))
    n_system = max(2, int(n_first * SYSTEM_SHARE))
    system = talk.text(n_system)
    history = talk.ask("first", system + talk.text(n_first - n_system))
    for turn in range(2, n_turns + 1):
        before, history = history, talk.ask(f"turn {turn}", history + talk.text(n_added))
    talk.ask("last turn edited", before + talk.text(n_added))
    talk.ask("same system prompt", system + talk.text(n_added))
    # Beside a turn's own tokens: the one that closes the answer before it, and the answer's last, which was not run.
    cache = llm.loaded.engine.cache
    n_more = 2 if cache.takes_snapshots or cache.kv is None else 2 + cache.kv.n_unit
    most = max(row["computed_tokens"] for row in talk.rows[2:])
    return {"rows": talk.rows[1:], "most_computed_later": most, "ok": most <= n_added + n_more}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--first", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--added", type=int, default=58)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = args.first + args.turns * (args.added + args.new + 2) + 64
    with LLM(args.model, device=args.device, memory=args.memory, context=context) as llm:
        result = measure(llm, args.first, args.turns, args.added, args.new)
        device = llm.loaded.resolved.device
    result |= {"model": Path(args.model).name, "device": device, "memory": args.memory}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        "every later turn computes its own tokens" if result["ok"] else "A LATER TURN COMPUTES MORE THAN ITS OWN TOKENS"
    )
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
