"""Matrices with a factor of their own (NVFP4 tensors) in a verb that has one scale for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from rimuru.ops.base import Act, Array, Weight


def with_factors(linear: Callable[..., None]) -> Callable[..., None]:
    """`Ops.linear` made of one that does not look at the weights' factors: a call for each of them."""

    @wraps(linear)
    def run(
        x: Act,
        weights: Sequence[Weight],
        outs: Sequence[Array],
        biases: Sequence[Array | None] | None = None,
        add: bool = False,
        scale: float = 1.0,
        row_scale: Array | None = None,
    ) -> None:
        groups = by_factor(weights)
        if len(groups) == 1:
            linear(x, weights, outs, biases, add, scale * weights[0].factor, row_scale)
            return
        for some in groups:
            some_biases = None if biases is None else [biases[i] for i in some]
            parts = [weights[i] for i in some], [outs[i] for i in some]
            linear(x, *parts, some_biases, add, scale * weights[some[0]].factor, row_scale)

    return run


def by_factor(weights: Sequence[Weight]) -> list[list[int]]:
    """Places of the weights of each factor."""
    groups: dict[float, list[int]] = {}
    for i, weight in enumerate(weights):
        groups.setdefault(weight.factor, []).append(i)
    return list(groups.values())
