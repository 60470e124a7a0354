"""How the demo model routes: figures of the kind that are published for large models, from its routers in PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from model import CHUNK, DemoModel, DemoShape, attention_mixer, delta_mixer, experts, rms_norm
from tokenizers import Tokenizer

FRACTIONS = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
PUBLISHED_FRACTIONS = (0.05, 0.08, 0.12, 0.20, 0.25, 0.36, 0.45, 0.64, 1.0)
PUBLISHED_HITS: dict[str, tuple[float | None, ...]] = {
    "Qwen3-235B (128, 8)": (0.34, 0.47, 0.58, 0.74, 0.80, 0.89, 0.93, 0.97, 0.979),
    "Qwen3.5-397B (512, 10)": (0.41, 0.50, 0.58, 0.70, 0.76, 0.83, 0.86, 0.89, 0.894),
    "GLM-5.2 (256, 8)": (0.30, 0.42, 0.50, 0.61, 0.67, 0.76, 0.82, 0.90, 0.924),
    "gemma-4-26B": (None, None, 0.53, None, 0.76, None, 0.88, 0.93, None),
}


@torch.no_grad()
def routes(model: DemoModel, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(used [n_layers, T, k], foretold [n_layers - 1, T, k]) expert ids for one text of T tokens.

    Foretold: the next layer's norm and router on the hidden state that enters this layer's experts.
    """
    shape, n_tokens = model.shape, len(ids)
    x = F.embedding(F.pad(ids, (0, -n_tokens % CHUNK))[None], model.tensors["token_embd/weight"])
    used, foretold = [], []

    def chosen(x: torch.Tensor, layer: int) -> np.ndarray:
        p = model.layer(layer)
        m = rms_norm(x[0, :n_tokens], p["post_attention_norm.weight"], shape.eps)
        best: np.ndarray = F.linear(m, p["ffn_gate_inp.weight"]).topk(shape.top_k).indices.numpy()
        return best

    for layer in range(shape.n_layers):
        p = model.layer(layer)
        x = x + (attention_mixer if shape.is_attention(layer) else delta_mixer)(x, p, shape)
        used.append(chosen(x, layer))
        if layer + 1 < shape.n_layers:
            foretold.append(chosen(x, layer + 1))
        x = x + experts(x, p, shape)[0]
    return np.stack(used), np.stack(foretold)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Mean share of a's ids [..., k] that are among b's [..., n]."""
    return float((a[..., :, None] == b[..., None, :]).any(-1).mean())


def hit_rate(used: np.ndarray, n_experts: int, capacity: int) -> float:
    """Of recently-used caches of `capacity` experts, one per layer, that start empty; used [n_layers, T, k]."""
    hits = 0
    for layer in used:
        cache: OrderedDict[int, None] = OrderedDict()
        for token in layer.tolist():
            for expert in token:
                if expert in cache:
                    hits += 1
                    cache.move_to_end(expert)
                else:
                    cache[expert] = None
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits / used.size


def skew(used: np.ndarray, n_experts: int) -> tuple[float, float]:
    """(share of uses by the most used tenth of the experts, share of experts that 90% of uses go to); layers' mean."""
    top, cover = [], []
    for layer in used:
        counts = np.sort(np.bincount(layer.reshape(-1), minlength=n_experts))[::-1] / layer.size
        tenth = n_experts / 10
        whole = int(tenth)
        top.append(counts[:whole].sum() + (tenth - whole) * counts[whole])
        cover.append((np.searchsorted(np.cumsum(counts), 0.9) + 1) / n_experts)
    return float(np.mean(top)), float(np.mean(cover))


def mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)


def routing_figures(
    weights: dict[str, np.ndarray], sizes: dict[str, Any], tokenizer: Path, text: str
) -> dict[str, Any]:
    """The figures over all stories of a held-out text; each story is a stream from its own start, caches live on."""
    shape = DemoShape(**sizes)
    model = DemoModel(shape)
    for name, tensor in model.gguf_tensors().items():
        tensor.data.copy_(torch.from_numpy(weights[name]))
    encoder = Tokenizer.from_file(str(tokenizer))
    stories = [encoder.encode(f"{story}<|endoftext|>").ids for story in text.split("<|endoftext|>")[:-1]]
    runs = [routes(model, torch.tensor(ids)) for ids in stories]
    used = np.concatenate([run[0] for run in runs], axis=1)
    n = shape.n_experts
    within8 = [np.concatenate([run[0][:, i : run[0].shape[1] - 8 + i] for i in range(8)], -1) for run in runs]
    foretold = [overlap(run[0][1:], run[1]) for run in runs]
    tops, covers = zip(*(skew(run[0], n) for run in runs), strict=True)
    top, cover = skew(used, n)
    return {
        "tokens": int(used.shape[1]),
        "experts": [n, shape.top_k],
        "fractions": list(FRACTIONS),
        "hits": [round(hit_rate(used, n, round(f * n)), 4) for f in FRACTIONS],
        "repeats_previous": mean(overlap(r[0][:, 1:], r[0][:, :-1]) for r in runs),
        "repeats_within_8": mean(overlap(r[0][:, 8:], b) for r, b in zip(runs, within8, strict=True)),
        "top_tenth_in_a_story": mean(tops),
        "top_tenth_over_all": round(top, 4),
        "experts_for_90_percent_in_a_story": mean(covers),
        "experts_for_90_percent_over_all": round(cover, 4),
        "next_layer_foretold": mean(foretold),
        "next_layer_foretold_by_layer": [
            mean(overlap(r[0][i + 1], r[1][i]) for r in runs) for i in range(shape.n_layers - 1)
        ],
    }
