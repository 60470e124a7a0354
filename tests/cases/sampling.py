"""Cases of the sampler: rows of logits with parameters of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from cases.common import Case, Inputs, Outputs, normal
from rimuru.ops.base import Ops, SampleParams


def params_of(n_rows: int, **fields: Any) -> SampleParams:
    """Neutral parameters for n_rows rows (greedy: temperature 0); fields replace them, scalars for all rows."""
    values: dict[str, Any] = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    lists: dict[str, Any] = {
        "history": np.int32, "output_ids": np.int32, "output_counts": np.int32, "bias_ids": np.int32,
        "bias_values": np.float32,
    }  # fmt: skip
    made: dict[str, Any] = {}
    for name, default in values.items():
        dtype = np.int32 if name == "top_k" else np.float32
        made[name] = np.broadcast_to(np.asarray(fields.get(name, default), dtype), (n_rows,)).copy()
    for name, dtype in lists.items():
        made[name] = [np.asarray(row, dtype) for row in fields.get(name, [[]] * n_rows)]
    return SampleParams(**made)


def random_params(rng: np.random.Generator, n_rows: int, n_vocab: int) -> SampleParams:
    """Different parameters in every row; every fourth row is greedy."""

    def some_ids() -> list[np.ndarray]:
        return [rng.permutation(n_vocab)[: rng.integers(0, min(n_vocab, 50) + 1)] for _ in range(n_rows)]

    output_ids, bias_ids = some_ids(), some_ids()
    return params_of(
        n_rows,
        temperature=np.where(np.arange(n_rows) % 4 == 0, 0.0, rng.uniform(0.2, 2.0, n_rows)),
        top_k=rng.choice([0, 1, 5, 40, n_vocab, n_vocab + 1], n_rows),
        top_p=rng.choice([0.1, 0.5, 0.9, 0.95, 1.0], n_rows),
        min_p=rng.choice([0.0, 0.01, 0.1], n_rows),
        uniform=rng.random(n_rows),
        repetition_penalty=rng.choice([1.0, 1.3], n_rows),
        presence_penalty=rng.choice([0.0, 0.6], n_rows),
        frequency_penalty=rng.choice([0.0, 0.2], n_rows),
        history=some_ids(),
        output_ids=output_ids,
        output_counts=[rng.integers(1, 5, len(ids)) for ids in output_ids],
        bias_ids=bias_ids,
        bias_values=[normal(rng, len(ids), scale=3.0) for ids in bias_ids],
    )


def sample_case(n_rows: int, n_vocab: int, greedy: bool = False, kind: Any = "edge") -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        params = params_of(n_rows) if greedy else random_params(rng, n_rows, n_vocab)
        return {"logits": normal(rng, n_rows, n_vocab, scale=3.0), "params": params}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.empty((n_rows,), np.int32)
        ops.sample(ops.upload(i["logits"]), i["params"], out)
        return {"ids": ops.download(out)}

    name = f"sample {n_rows}x{n_vocab}{' greedy' if greedy else ''}"
    n_bytes = n_rows * n_vocab * 4
    return Case(name, make, run, lambda _: n_bytes, lambda _: n_rows * n_vocab * 4, 0.0, kind)


CASES: tuple[Case, ...] = (
    sample_case(1, 1),
    sample_case(7, 2),
    sample_case(64, 100),
    sample_case(64, 1000),
    sample_case(5, 1000, greedy=True),
    sample_case(8, 151936, kind="model"),
    sample_case(8, 151936, greedy=True, kind="model"),
)
