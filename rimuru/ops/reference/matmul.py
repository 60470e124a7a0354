"""Reference of the matrix verbs: dequantise, then multiply in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rimuru.formats.quants_ref import dequantize
from rimuru.ops.base import Act, Array, Weight


def linear(
    x: Act,
    weights: Sequence[Weight],
    outs: Sequence[Array],
    biases: Sequence[Array | None] | None = None,
    add: bool = False,
    scale: float = 1.0,
    row_scale: Array | None = None,
) -> None:
    for index, (weight, out) in enumerate(zip(weights, outs, strict=True)):
        matrix = dequantize(weight.data, weight.format).astype(np.float64)
        product = x.f32[: len(out)].astype(np.float64) @ matrix.T
        bias = None if biases is None else biases[index]
        if bias is not None:
            product += bias
        product *= scale * weight.factor
        if row_scale is not None:
            product *= row_scale[: len(out), None]
        out[...] = out + product if add else product


def head_linear(x: Array, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
    n_tokens = len(x)
    matrices = dequantize(weight.data, weight.format).astype(np.float64).reshape(n_head, -1, weight.n_in)
    inputs = x.reshape(n_tokens, n_head, -1)
    outputs = out.f32[:n_tokens].reshape(n_tokens, n_head, -1)
    n_out = matrices.shape[1]
    products = np.einsum("hoi,thi->tho", matrices, inputs[:, :, : weight.n_in].astype(np.float64))
    outputs[:, :, :n_out] = products * weight.factor
    outputs[:, :, n_out:] = inputs[:, :, weight.n_in :]
