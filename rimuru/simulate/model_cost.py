"""Bytes and operations of a model's layers, counted from its tensors and its pool layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rimuru.arch.spec import ModelConfig, MoeSpec
from rimuru.arch.tensors import expert_tensors, model_tensors
from rimuru.formats.gguf import TensorInfo
from rimuru.memory.specs import PoolLayout


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Arrays float64 [n_layers] per layer; one operation = one multiplication and one addition counted as two."""

    dense_bytes: np.ndarray
    dense_operations: np.ndarray
    """Per token."""
    slot_of_layer: tuple[int, ...]
    """Layer slot of the experts of each layer, -1 = none."""
    expert_bytes: np.ndarray
    """Useful bytes of one expert."""
    all_expert_bytes: np.ndarray
    """Of all of a layer."""
    expert_operations: np.ndarray
    """Of all experts of a token."""
    context_bytes: np.ndarray
    """Of the keys and values of one token of context."""
    state_bytes: np.ndarray
    """Read and written per sequence and step."""
    head_bytes: float
    head_operations: float
    """Per row of logits."""
    top_k: int


def model_cost(config: ModelConfig, tensors: Mapping[str, TensorInfo], layout: PoolLayout) -> ModelCost:
    """Of a model with routed experts or without."""
    n_layers = len(config.layers)
    experts = {part.tensor for parts in expert_tensors(config).values() for part in parts}
    dense, operations = np.zeros(n_layers), np.zeros(n_layers)
    head_bytes = head_operations = 0.0
    for name in model_tensors(config):
        info = tensors[name]
        n_elements = float(np.prod(info.shape, dtype=np.int64))
        if name.startswith("blk.") and name not in experts:
            layer = int(name.split(".")[1])
            dense[layer] += info.n_bytes
            operations[layer] += 2 * n_elements
        elif name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in tensors):
            head_bytes, head_operations = info.n_bytes, 2 * n_elements
    expert_layers = () if layout.expert is None else layout.expert.layers
    slots = {part.layer: slot for slot, part in enumerate(expert_layers)}
    slot_of_layer = tuple(slots.get(layer.index, -1) for layer in config.layers)
    expert_bytes, all_bytes, expert_operations = np.zeros(n_layers), np.zeros(n_layers), np.zeros(n_layers)
    top_k = 0
    for index, (spec, slot) in enumerate(zip(config.layers, slot_of_layer, strict=True)):
        if slot >= 0 and isinstance(spec.ffn, MoeSpec):
            part = expert_layers[slot]
            top_k = max(top_k, spec.ffn.top_k)
            expert_bytes[index], all_bytes[index] = part.useful_bytes, part.n_experts * part.useful_bytes
            n_elements = sum(p.n_rows * p.n_in for p in part.projections)
            expert_operations[index] = 2.0 * n_elements * spec.ffn.top_k
    return ModelCost(
        dense, operations, slot_of_layer, expert_bytes, all_bytes, expert_operations,
        _context_bytes(layout, n_layers), _state_bytes(layout, n_layers), head_bytes, head_operations, top_k,
    )  # fmt: skip


def _context_bytes(layout: PoolLayout, n_layers: int) -> np.ndarray:
    """Windows are counted as if they were full context, which is what short requests have."""
    found = np.zeros(n_layers)
    for group in () if layout.kv is None else layout.kv.groups:
        for layer in group.layers:
            found[layer] += group.layer_bytes / group.page_tokens
    return found


def _state_bytes(layout: PoolLayout, n_layers: int) -> np.ndarray:
    found = np.zeros(n_layers)
    if layout.ssm is not None:
        found[list(layout.ssm.layers)] += 2 * layout.ssm.state_bytes
    if layout.conv is not None:
        found[list(layout.conv.layers)] += 2 * layout.conv.n_rows * layout.conv.row_bytes
    return found
