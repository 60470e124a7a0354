"""What is gone through before the first request, so that no request waits for a compiler: batches that stand for all
steps a model may be asked for, each way of choosing a token, each decision between two steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rimuru.batch import Batch
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.residency import Residency
from rimuru.experts.ways import first_way, launched_as
from rimuru.memory.adjuster import MOST_DECODE_TOKENS, cost_expand, offload_target, paper_decision, shrink_pays
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout, PoolLayout
from rimuru.request import SamplingParams, Sequence

PIECE_GROWTH = 1.25
"""From one length of a prompt's piece to the next: kernels change at few places."""

WAYS_TO_CHOOSE = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=1, top_p=0.5, min_p=0.1),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={0: 0.1}
    ),
)
"""One for each path through a backend's sampler."""


def rehearsal_sequences() -> list[Sequence]:
    """A finished prompt of one token and one of answer for each way to choose the next one."""
    sequences = []
    for params in WAYS_TO_CHOOSE:
        sequence = Sequence(-1, [0], 1, params, np.random.default_rng(0), frozenset(), 0)
        sequence.append(0)
        sequences.append(sequence)
    return sequences


def rehearse_decisions() -> None:
    """Compile what decides about experts between steps; the arguments have the types that a room gives."""
    residency = Residency(ExpertLayout(1, (ExpertLayerLayout(0, 1, 1, ()),)))
    residency.hottest_absent(1)
    residency.absent_of(residency.coldest_first())
    paper_decision(0, 0, 1.0)
    offload_target(np.zeros(1), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    shrink_pays(2, 1.0, 0.0, 0.0, 0.0, 0.0)
    cost_expand(0, 1.0, 1.0, 1.0)


def rehearsal_batches(max_tokens: int, decode_sizes: list[int], layout: PoolLayout) -> Iterator[Batch]:
    """One decode step per size, pieces of one prompt of 2 to max_tokens tokens, and both kinds together, for which a
    backend may have kernels of their own: any number of answers beside the first piece of a prompt, and the longest
    one beside those of each size. Only the shapes mean something."""
    for n_seqs in decode_sizes:
        yield batch_of([1] * n_seqs, layout)
    for n_tokens in growing(2, max_tokens):
        yield batch_of([n_tokens], layout)
    yield batch_of([max_tokens], layout)
    most_answers = min(max(decode_sizes) - 1, max_tokens - 2)
    for n_answers in [*growing(1, most_answers), most_answers]:
        if n_answers > 0:
            yield batch_of([*[1] * n_answers, 2], layout)
    for n_answers in [n_seqs - 1 for n_seqs in decode_sizes if 0 < n_seqs - 1 < max_tokens - 2]:
        yield batch_of([*[1] * n_answers, max_tokens - n_answers], layout)


def rehearsal_steps(max_tokens: int, decode_sizes: list[int], layout: PoolLayout, store: object) -> Iterator[Batch]:
    """rehearsal_batches, and where missed experts may come in several ways, or all are resident, the steps that are
    then run otherwise."""
    if not isinstance(store, DeviceExpertStore):
        yield from rehearsal_batches(max_tokens, decode_sizes, layout)
        return
    first = store.way
    for way in dict.fromkeys(map(launched_as, store.ways)):
        store.way = way
        if way == launched_as(first_way(max_tokens, store.ways)):
            yield from rehearsal_batches(max_tokens, decode_sizes, layout)
            continue
        yield from (batch_of([1] * n_seqs, layout) for n_seqs in decode_sizes)
        yield from (batch_of([n], layout) for n in growing(2, min(max_tokens, MOST_DECODE_TOKENS) + 1))
    store.way, store.is_watching = first, False
    yield from (batch_of([1] * n_seqs, layout) for n_seqs in decode_sizes)
    store.is_watching = True


def growing(first: int, end: int) -> Iterator[int]:
    """Numbers from `first` to below `end`, each the next whole one that is larger by PIECE_GROWTH."""
    n = first
    while n < end:
        yield n
        n = max(n + 1, int(n * PIECE_GROWTH))


def batch_of(n_tokens: list[int], layout: PoolLayout) -> Batch:
    """A batch of sequences that start here and have no pages."""
    counts = np.array(n_tokens, np.int32)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    n_seqs, total = len(counts), int(ends[-1])
    seq_of_token = np.repeat(np.arange(n_seqs, dtype=np.int32), counts)
    n_groups = 0 if layout.kv is None else len(layout.kv.groups)
    return Batch(
        token_ids=np.zeros(total, np.int32),
        positions=np.arange(total, dtype=np.int32) - ends[seq_of_token],
        seq_of_token=seq_of_token,
        query_start=ends,
        context_len=counts,
        kv_pages=np.full((n_groups, n_seqs, 1), -1, np.int32),
        ssm_pages=np.full((n_seqs, 0 if layout.ssm is None else len(layout.ssm.layers)), -1, np.int32),
        conv_pages=np.full((n_seqs, 0 if layout.conv is None else len(layout.conv.layers)), -1, np.int32),
        fresh_state=np.ones(n_seqs, np.bool_),
        logit_rows=ends[1:] - 1,
    )
