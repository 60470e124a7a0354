"""rimuru perplexity: how well the model predicts a text."""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
from tqdm import tqdm

from rimuru.base.errors import BadInputError
from rimuru.commands.common import note, open_llm, print_json, read_text
from rimuru.engine.sampler import log_softmax
from rimuru.formats.demo import held_out_path, is_demo
from rimuru.llm import LLM

DEFAULT_WINDOW_TOKENS = 512


def perplexity(args: argparse.Namespace) -> int:
    """Print the perplexity of a text: exp of the mean negative log-likelihood of its tokens.

    The text is cut into windows of `--window` tokens that do not overlap; every token but a window's first is scored
    given the window's tokens before it.
    """
    if args.file is None and not is_demo(args.model):
        raise BadInputError("give a text with -f; only the demo model comes with one")
    args.file = str(held_out_path()) if args.file is None else args.file
    text = read_text(args.file)

    def check(llm: LLM) -> None:
        if args.window is not None and not 2 <= args.window <= llm.context_length:
            raise BadInputError(f"--window must be between 2 and the context of {llm.context_length} tokens")
        if len(llm.tokenize(text)) < 2:
            raise BadInputError(f"{args.file} has fewer than 2 tokens: there is nothing to predict")

    with open_llm(args, check) as llm:
        ids = llm.tokenize(text)
        window = args.window or min(DEFAULT_WINDOW_TOKENS, llm.context_length)
        result = evaluate(llm, ids, window, quiet=args.quiet)
    if args.json:
        print_json(result)
    else:
        print(
            f"perplexity {result['perplexity']:.4f} +- {result['standard_error']:.4f} "
            f"over {result['scored_tokens']} tokens"
        )
    return 0


def evaluate(llm: LLM, ids: list[int], window: int, quiet: bool = True) -> dict[str, float]:
    """Perplexity of token ids; keys perplexity, standard_error, nll_mean, scored_tokens, windows, window_tokens."""
    losses: list[np.ndarray] = []
    starts = range(0, len(ids) - 1, window)
    for start in tqdm(starts, desc="windows", disable=quiet or not sys.stderr.isatty()):
        piece = ids[start : start + window]
        if len(piece) < 2:
            break
        losses.append(window_losses(llm, piece))
    nll = np.concatenate(losses)
    mean = float(nll.mean())
    error = float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else 0.0
    if not math.isfinite(mean):
        note("the model gives some tokens probability zero")
    return {
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "standard_error": math.exp(mean) * error if mean < 700 else math.inf,
        "nll_mean": mean,
        "scored_tokens": len(nll),
        "windows": len(losses),
        "window_tokens": window,
    }


def window_losses(llm: LLM, ids: list[int]) -> np.ndarray:
    """float64 [n - 1] negative log-likelihoods of ids[1:], each given the ids before it."""
    losses, position = [], 0
    for logits in llm.score(ids):
        targets = np.array(ids[position + 1 : position + 1 + len(logits)])
        rows = log_softmax(logits[: len(targets)])
        losses.append(-rows[np.arange(len(targets)), targets])
        position += len(logits)
    return np.concatenate(losses)
