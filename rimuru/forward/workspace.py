"""Activation buffers: asked for while the model is built, allocated once, reused by every layer and step."""

from __future__ import annotations

from typing import Any

import numpy as np

from rimuru.arch.spec import MoeSpec
from rimuru.ops.base import Act, Array, MoeScratch, Ops

MAX_VIEWS = 2048
"""Views kept: those of some hundred lengths of a step. Making one costs microseconds, and every layer asks anew."""


class Workspace:
    """Buffers for up to max_tokens tokens. Names are shared on purpose: layers run one after the other.

    `need_*` while building; `bytes_for` tells what a number of tokens takes; `allocate` once; then `array` and `act`
    hand out views of the first n tokens.
    """

    def __init__(self, ops: Ops, max_tokens: int) -> None:
        self.ops = ops
        self.max_tokens = max_tokens
        self._widths: dict[str, tuple[int, Any]] = {}
        self._acts: dict[tuple[str, int], Act] = {}
        self._act_rows: dict[tuple[str, int], int] = {}
        self._flat: dict[str, Array] = {}
        self._moe_needs: dict[tuple[int, int], MoeSpec] = {}
        self._moe: dict[tuple[int, int], MoeScratch] = {}
        self._views: dict[tuple[str, int, int], Array] = {}
        self._heads: dict[tuple[str, int, int], Act] = {}
        self.fixed_bytes = 0
        """Of scratch that backends hold themselves, whatever the number of tokens."""

    def need_array(self, name: str, width: int, dtype: Any = np.float32) -> None:
        """A buffer [max_tokens, width]; the largest width asked for under a name wins."""
        old = self._widths.get(name, (0, dtype))
        self._widths[name] = (max(old[0], width), dtype)

    def need_act(self, name: str, width: int, n_rows: int = 1) -> None:
        """An activation of n_rows rows for every token."""
        key = (name, width)
        self._act_rows[key] = max(self._act_rows.get(key, 1), n_rows)

    def need_moe(self, spec: MoeSpec, n_in: int) -> None:
        """Expert scratch; layers whose experts have the same widths share one."""
        self._moe_needs[(spec.width, n_in)] = spec

    def bytes_for(self, max_tokens: int) -> int:
        """Bytes of all buffers for up to max_tokens tokens."""
        total = self.fixed_bytes
        total += sum(max_tokens * width * np.dtype(dtype).itemsize for width, dtype in self._widths.values())
        total += sum(self.ops.act_bytes(n * max_tokens, width) for (_, width), n in self._act_rows.items())
        return total + sum(
            self.ops.moe_scratch_bytes(max_tokens, spec, n_in) for (_, n_in), spec in self._moe_needs.items()
        )

    def allocate(self, max_tokens: int) -> None:
        """Make the buffers, for up to max_tokens tokens: not more than were announced."""
        self.max_tokens = max_tokens
        for name, (width, dtype) in self._widths.items():
            self._flat[name] = self.ops.empty((self.max_tokens * width,), dtype)
        for (name, width), rows in sorted(self._act_rows.items()):
            self._acts[(name, width)] = self.ops.act(rows * self.max_tokens, width)
        for (width, n_in), spec in self._moe_needs.items():
            scratch = self._moe[(width, n_in)] = self.ops.moe_scratch(self.max_tokens, spec, n_in)
            scratch.only_summed = True

    def array(self, name: str, n_tokens: int, width: int) -> Array:
        """View [n_tokens, width], contiguous."""
        key = (name, n_tokens, width)
        view = self._views.get(key)
        if view is None:
            view = _keep(self._views, key, self._flat[name][: n_tokens * width].reshape(n_tokens, width))
        return view

    def vector(self, name: str, n_tokens: int) -> Array:
        """View [n_tokens]."""
        key = (name, n_tokens, 0)
        view = self._views.get(key)
        if view is None:
            view = _keep(self._views, key, self._flat[name][:n_tokens])
        return view

    def act(self, name: str, n_rows: int, width: int) -> Act:
        """The first n_rows rows: one a token, or as many as `need_act` said."""
        key = (name, n_rows, width)
        head = self._heads.get(key)
        if head is None:
            head = _keep(self._heads, key, self._acts[(name, width)].head(n_rows))
        return head

    def moe(self, spec: MoeSpec, n_in: int) -> MoeScratch:
        return self._moe[(spec.width, n_in)]


def _keep(views: dict[tuple[str, int, int], Any], key: tuple[str, int, int], view: Any) -> Any:
    """Remember a view; all are forgotten where there are too many."""
    if len(views) >= MAX_VIEWS:
        views.clear()
    views[key] = view
    return view
