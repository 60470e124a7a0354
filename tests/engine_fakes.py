"""An engine without weights: the real scheduler, cache, pool and sampler around a runner that invents logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rimuru.batch import Batch
from rimuru.engine.engine import Engine
from rimuru.engine.sampler import Sampler
from rimuru.engine.scheduler import NoRoom, Scheduler
from rimuru.memory.cache import SequenceCache
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import KvGroupLayout, KvLayout, PoolLayout
from rimuru.ops.reference import ReferenceOps

N_VOCAB = 97
PAGE_TOKENS = 4


@dataclass
class FakeMemory:
    """Addresses that nobody reads."""

    mapped_bytes: int
    base: int = 1 << 30

    def resize(self, n_bytes: int) -> None:
        self.mapped_bytes = n_bytes

    def close(self) -> None:
        self.mapped_bytes = 0


def kv_only_layout(window: int | None = None) -> PoolLayout:
    """A dense model of two layers: a slab of eight KV pages of four tokens."""
    groups = [KvGroupLayout((0, 1), 2, 8, 8, PAGE_TOKENS, None, 4)]
    if window is not None:
        groups.append(KvGroupLayout((2, 3), 2, 8, 8, PAGE_TOKENS, window, 4))
    page_bytes = groups[0].useful_bytes
    return PoolLayout(8 * page_bytes, None, KvLayout(page_bytes, tuple(groups), "expert"), None, None, 8 * page_bytes)


def next_token(token_id: int, position: int) -> int:
    """What the fake model answers: depends on the last token and its position, so that a mix-up shows."""
    return (token_id * 31 + position * 17 + 5) % N_VOCAB


class FakeRunner:
    """Logits that make next_token the best; checks that the batch is well formed and that pages do not mix."""

    def __init__(self, layout: PoolLayout, sampler: Sampler) -> None:
        self.layout, self.sampler = layout, sampler
        self.written: dict[int, tuple[int, int]] = {}
        self.steps: list[int] = []
        self.fail_next = False

    def run(self, batch: Batch) -> np.ndarray:
        self.steps.append(batch.n_tokens)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        late = batch.token_ids < 0
        batch.token_ids[late] = self.sampler.ids[-1 - batch.token_ids[late]]
        self._check(batch)
        logits = np.zeros((len(batch.logit_rows), N_VOCAB), np.float32)
        for row, token_row in enumerate(batch.logit_rows):
            logits[row, next_token(int(batch.token_ids[token_row]), int(batch.positions[token_row]))] = 9.0
        return logits

    def _check(self, batch: Batch) -> None:
        """Write (token, position) to every slot the batch names, and read each sequence's context back."""
        pages = batch.kv_pages[0]
        for t in range(batch.n_tokens):
            seq, position = int(batch.seq_of_token[t]), int(batch.positions[t])
            slot = int(pages[seq, position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS
            assert slot >= 0
            self.written[slot] = (int(batch.token_ids[t]), position)
        for seq in range(batch.n_seqs):
            for position in range(int(batch.context_len[seq])):
                slot = int(pages[seq, position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS
                assert self.written[slot][1] == position


def fake_engine(
    n_huge: int, max_step_tokens: int = 16, max_sequences: int = 8, context: int = 64, prefix_cache: bool = True,
    eog: frozenset[int] = frozenset(), *, overlaps: bool = False,
) -> Engine:  # fmt: skip
    layout = kv_only_layout()
    pool = PagePool(FakeMemory(n_huge * layout.huge_bytes), layout)
    cache = SequenceCache(pool, layout, prefix_cache=prefix_cache)
    scheduler = Scheduler(cache, NoRoom(), max_step_tokens, max_sequences)
    ops = ReferenceOps(np.float32)
    runner = FakeRunner(layout, sampler := Sampler(ops, max_sequences))
    engine = Engine(scheduler, cache, pool, layout, runner, sampler, context, N_VOCAB, eog, 0)  # type: ignore[arg-type]
    engine.overlaps = overlaps
    return engine


def expected_answer(prompt: list[int], n_tokens: int) -> list[int]:
    """What a greedy run must give for a prompt, whatever else runs."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]
