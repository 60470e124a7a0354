"""Where conversations branch: the token counts at which recurrent states are saved, because they cannot be cut.

In a prompt: after its first turn (the system prompt, which conversations share), after its last turns (the last one may
be edited, an answer asked for again), and one token before its end (a hit must leave one token to run). In an answer:
after the token that opens a tool call, whose text may come back written in another way; the end of the answer is kept
by whoever releases the sequence.
"""

from __future__ import annotations

from rimuru.request import Sequence
from rimuru.text.tokenizer import Tokenizer

LAST_TURNS = 3
"""Ends of turns, counted from the last, at which a prompt's states are saved."""
CALL_OPENERS = ("<tool_call>", "<|tool_call|>", "<|tool_call_start|>", "<TOOLCALL>", "<tool_calls>", "[TOOL_CALLS]")
"""Texts of tokens that open a tool call: Qwen and Granite, Granite 3, LFM2, Nemotron, Jamba, Mistral."""


def branch_points(token_ids: list[int], eog_ids: frozenset[int]) -> tuple[int, ...]:
    """Token counts inside a prompt, ascending. A turn ends with a token that ends an answer."""
    turns = [i + 1 for i, token_id in enumerate(token_ids) if token_id in eog_ids]
    points = {*turns[:1], *turns[-LAST_TURNS:], len(token_ids) - 1}
    return tuple(sorted(p for p in points if 0 < p < len(token_ids)))


def call_openers(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids of the vocabulary's tokens that open a tool call."""
    if tokenizer is None:
        return frozenset()
    return frozenset(i for text in CALL_OPENERS if (i := tokenizer.token_id(text)) is not None)


def mark_call(sequence: Sequence, token_id: int, openers: frozenset[int]) -> None:
    """The answer got a token: where it opens the answer's first tool call, the states after it will be saved."""
    is_first = not sequence.snapshot_at or sequence.snapshot_at[-1] <= sequence.n_prompt
    if token_id in openers and is_first:
        sequence.snapshot_at += (sequence.n_tokens,)
