"""An engine for the real shape of a hybrid model, without weights: scheduler, cache, allocator, experts and snapshots
are the real ones; a runner keeps a hash of everything a sequence has read in its state pages and KV pages instead.

The hash decides the next token, so that an answer is right only if every state, every KV page, and every copy of them
was that of exactly this prefix. Memory is a dict from page addresses to contents; what a page held before stays in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.arch.shapes import shape_gguf
from rimuru.batch import Batch
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.engine.engine import Engine
from rimuru.engine.room import ExpertRoom
from rimuru.engine.sampler import Sampler
from rimuru.engine.scheduler import Scheduler
from rimuru.inspect import dense_weight_bytes
from rimuru.memory.cache import SequenceCache
from rimuru.memory.page_pool import PagePool
from rimuru.memory.planner import plan_layout
from rimuru.memory.specs import PoolLayout
from rimuru.ops.reference import ReferenceOps
from rimuru.request import SamplingParams, Sequence
from rimuru.simulate.store import SimulatedStore

N_VOCAB = 101
END, CALL = 1, 2
"""Tokens that end a turn, and that open a tool call."""
SCRATCH_BYTES = 750_000_000
_MASK = (1 << 61) - 1


def read_token(state: int, token_id: int) -> int:
    """The state after one more token."""
    return (state * 6364136223846793005 + token_id * 2654435761 + 1442695040888963407) & _MASK


def answer_token(state: int) -> int:
    """What follows: mostly text, sometimes the end or a tool call."""
    kind = (state >> 20) % 16
    return END if kind == 0 else CALL if kind == 1 else 3 + (state >> 8) % (N_VOCAB - 3)


def expected_answer(prompt: list[int], n_tokens: int, ignore_end: bool = False) -> list[int]:
    """What a greedy run must give, whatever else happens."""
    state = 0
    answer: list[int] = []
    for token_id in prompt:
        state = read_token(state, token_id)
    while len(answer) < n_tokens:
        answer.append(answer_token(state))
        if answer[-1] == END and not ignore_end:
            break
        state = read_token(state, answer[-1])
    return answer


@dataclass
class Memory:
    """The pool's range, and contents of pages by address (host memory too)."""

    mapped_bytes: int
    base: int = 1 << 44

    def __post_init__(self) -> None:
        self.contents: dict[int, Any] = {}

    def resize(self, n_bytes: int) -> None:
        self.mapped_bytes = n_bytes

    def close(self) -> None:
        self.mapped_bytes = 0


class Copier:
    """Copies contents, page by page. Host memory is a number of addresses that nobody can write to."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.host_bytes = self.n_in = self.n_out = 0

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        self.host_bytes += n_bytes
        return np.lib.stride_tricks.as_strided(np.empty(n_bytes, np.uint8))  # never touched: no memory is used

    def _copy(self, target: int, source: int) -> None:
        content = self.memory.contents.get(source)
        self.memory.contents[target] = content.copy() if isinstance(content, np.ndarray) else content

    def copy_in(self, address: int, source: np.ndarray) -> None:
        self.n_in += 1
        self._copy(address, source.ctypes.data)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        self.n_out += 1
        self._copy(target.ctypes.data, address)

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        self._copy(target, source)

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        self.memory.contents[address] = ("poison", value)

    def record(self) -> None:
        return None

    def done(self, marker: object) -> bool:
        return True

    def wait(self, marker: object = None) -> None:
        return None

    def close(self) -> None:
        return None


class Store(SimulatedStore):
    """Experts whose reads are done when the next step begins."""

    def begin_step(self) -> None:
        self.finish_reads()
        self.residency.begin_step(1)


class Runner:
    """Reads and writes states and KV as a model would; `n_run` counts tokens."""

    def __init__(self, layout: PoolLayout, pool: PagePool, sampler: Sampler, memory: Memory) -> None:
        self.layout, self.pool, self.sampler, self.contents = layout, pool, sampler, memory.contents
        assert layout.kv is not None
        self.page_tokens = [group.page_tokens for group in layout.kv.groups]
        self.n_run = 0

    def run(self, batch: Batch) -> np.ndarray:
        late = batch.token_ids < 0
        batch.token_ids[late] = self.sampler.ids[-1 - batch.token_ids[late]]
        self.n_run += batch.n_tokens
        states = np.zeros(batch.n_tokens, np.int64)
        for s in range(batch.n_seqs):
            first, last = int(batch.query_start[s]), int(batch.query_start[s + 1])
            states[first:last] = self._run_sequence(batch, s, first, last)
        logits = np.zeros((len(batch.logit_rows), N_VOCAB), np.float32)
        for row, token_row in enumerate(batch.logit_rows):
            logits[row, answer_token(int(states[token_row]))] = 9.0
        return logits

    def _run_sequence(self, batch: Batch, s: int, first: int, last: int) -> list[int]:
        position = int(batch.positions[first])
        places = [*self.pool.addresses("ssm", batch.ssm_pages[s]), *self.pool.addresses("conv", batch.conv_pages[s])]
        assert all(places) and len(set(places)) == len(places)
        held = [(0, 0) if batch.fresh_state[s] else self.contents[int(place)] for place in places]
        assert all(content == held[0] for content in held), "states of two different prefixes"
        state, n_tokens = held[0]
        assert n_tokens == position, f"a state after {n_tokens} tokens is used at token {position}"
        groups = [self.pool.addresses("kv", rows) for rows in batch.kv_pages[:, s]]
        for pages, n_page in zip(groups, self.page_tokens, strict=True):
            self._check_kv(pages, n_page, position, state)
        states = []
        for at, token_id in enumerate(batch.token_ids[first:last].tolist(), position):
            state = read_token(state, token_id)
            states.append(state)
            for pages, n_page in zip(groups, self.page_tokens, strict=True):
                page = int(pages[at // n_page])
                assert page
                if not isinstance(self.contents.get(page), np.ndarray):
                    self.contents[page] = np.full(n_page, -1, np.int64)
                self.contents[page][at % n_page] = state
        for place in places:
            self.contents[int(place)] = (state, position + last - first)
        return states

    def _check_kv(self, pages: np.ndarray, n_page: int, n_tokens: int, state: int) -> None:
        """The last token's KV is that of the state (and so, by the hash, of the whole prefix); none is missing."""
        for column in range(-(-n_tokens // n_page)):
            content = self.contents[int(pages[column])]
            assert isinstance(content, np.ndarray) and (content[: n_tokens - column * n_page] >= 0).all()
        if n_tokens:
            last = self.contents[int(pages[(n_tokens - 1) // n_page])][(n_tokens - 1) % n_page]
            assert last == state, "KV and state are of different prefixes"


@dataclass
class World:
    engine: Engine
    cache: SequenceCache
    pool: PagePool
    room: CompactingRoom
    store: Store | None
    runner: Runner
    copier: Copier

    def ask(self, prompt: list[int], n_tokens: int = 40, ignore_end: bool = False) -> Sequence:
        """Run one request to its end, and check its answer."""
        (sequence,) = self.ask_all([prompt], n_tokens, ignore_end)
        return sequence

    def ask_all(self, prompts: list[list[int]], n_tokens: int = 40, ignore_end: bool = False) -> list[Sequence]:
        """Run requests together, and check their answers."""
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=ignore_end)
        sequences = [self.engine.add(prompt, params) for prompt in prompts]
        self.engine.run_until(sequences)
        while self.engine.has_work:
            self.engine.step()
        self.engine.audit()
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.error is None
            assert sequence.output_ids == expected_answer(prompt, n_tokens, ignore_end)
        return sequences


def make_world(
    name: str = "qwen3.5-35b-a3b",
    memory_bytes: int = int(24e9),
    quant: str = "q4_k_m",
    *,
    overlaps: bool = False,
    host_bytes: int = 0,
    policy: str = "cost",
    max_step_tokens: int = 2048,
    context: int = 32768,
) -> World:
    """Dense weights and scratch are taken off; experts fill what is left, as at the start of a server."""
    gguf, config = shape_gguf(name, quant)
    layout = plan_layout(config, gguf, 2)
    pool_bytes = memory_bytes - dense_weight_bytes(config, gguf.tensors) - SCRATCH_BYTES
    memory = Memory(pool_bytes // layout.huge_bytes * layout.huge_bytes)
    copier = Copier(memory)
    pool = PagePool(memory, layout, None, copier)
    cache = SequenceCache(pool, layout, host_bytes=host_bytes)
    assert layout.expert is not None
    room = ExpertRoom(cache, pool, layout, None, policy)  # type: ignore[arg-type]
    store = Store(layout.expert, pool, None, room.may_grow, True, "auto")
    room.store = store
    store.preload()
    scheduler = Scheduler(cache, room, max_step_tokens, 32)
    sampler = Sampler(ReferenceOps(np.float32), 32)
    runner = Runner(layout, pool, sampler, memory)
    engine = Engine(
        scheduler, cache, pool, layout, runner, sampler, context, N_VOCAB, frozenset((END,)), 0, store,  # type: ignore[arg-type]
        frozenset((CALL,)),
    )  # fmt: skip
    engine.overlaps = overlaps
    return World(engine, cache, pool, room, store, runner, copier)


def text(rng: np.random.Generator, n_tokens: int) -> list[int]:
    """A turn of random tokens."""
    return [*rng.integers(3, N_VOCAB, n_tokens - 1).tolist(), END]


def scatter(world: World, rng: np.random.Generator) -> None:
    """Residents leave and others come at random, so that every huge page holds parts of many experts."""
    store = world.store
    assert store is not None
    for _ in range(12):
        rows = np.argwhere(store.residency.resident)
        for slot, expert in rows[rng.choice(len(rows), 400, replace=False)].tolist():
            world.pool.free("expert", store.take_out(slot, expert))
        absent = np.argwhere(store.residency.exists & ~store.residency.resident)
        for slot, expert in absent[rng.permutation(len(absent))].tolist():
            pages = store.begin(slot)
            if pages is None:
                continue
            store.settle(slot, expert, pages)
