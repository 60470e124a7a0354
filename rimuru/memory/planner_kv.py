"""Which layers and tokens share a KV page.

A page holds `page_tokens` tokens of several layers of one geometry. Fewer, larger groups of layers mean fewer pages
to allocate and look up per token step; the tokens need not be a power of two, so a page can fill a divisor of its
parent closely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rimuru.base.units import KIB, MIB, align_up, ceil_div
from rimuru.memory.specs import KvGeometry, KvGroupLayout

MAX_WASTE = 0.05
TOKEN_RANGES = ((16, 64), (8, 256), (1, 1024))
"""Tokens of a page by preference: from 16 on, reads of a head are long enough to stream; up to 64, what a sequence
does not fill of its last page is small."""
MAX_TOKEN_MULTIPLE = 8
PAGE_ALIGNMENT_BYTES = 64
MAX_PAGES_PER_PARENT = 1024
_SLAB_BYTES = 2 * MIB
_MAX_SLAB_PAGES = 16
_MAX_SLAB_KV_PAGE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class KvPages:
    """A choice: page size, and per geometry the tokens of a page and the number of groups its layers fall into."""

    page_bytes: int
    page_tokens: tuple[int, ...]
    n_groups: tuple[int, ...]
    waste: float
    """Of the geometry that wastes most."""


@dataclass(frozen=True, slots=True)
class _Class:
    n_layers: int
    token_bytes: int


def choose_in_parent(
    layers_of: Mapping[KvGeometry, list[int]], element_bytes: int, parent_bytes: int
) -> KvPages | None:
    """Pages that divide a parent page. None where no page of a whole token fits."""
    classes = _classes(layers_of, element_bytes)
    sizes = [
        parent_bytes // n
        for n in range(1, MAX_PAGES_PER_PARENT + 1)
        if parent_bytes % n == 0 and parent_bytes // n % PAGE_ALIGNMENT_BYTES == 0
    ]
    fallback: KvPages | None = None
    for lowest, highest in TOKEN_RANGES:
        best = _best(_choices(classes, sizes, lowest, highest))
        if best is not None and best.waste < MAX_WASTE:
            return best
        if best is not None and (fallback is None or best.waste < fallback.waste):
            fallback = best
    return fallback


def choose_free(layers_of: Mapping[KvGeometry, list[int]], element_bytes: int) -> tuple[KvPages, int]:
    """Pages of a model that has no other pages, and the bytes of the slab they are carved from."""
    classes = _classes(layers_of, element_bytes)
    lowest, _ = TOKEN_RANGES[0]
    sizes = set()
    for cls in classes:
        for n_layers in range(1, cls.n_layers + 1):
            for multiple in range(1, MAX_TOKEN_MULTIPLE + 1):
                size = align_up(n_layers * multiple * lowest * cls.token_bytes, KIB)
                if size <= _MAX_SLAB_KV_PAGE_BYTES or n_layers == 1:
                    sizes.add(size)
    best = _best(_choices(classes, sorted(sizes), lowest, lowest))
    assert best is not None  # one layer of one token multiple always fits
    return best, best.page_bytes * min(_MAX_SLAB_PAGES, ceil_div(_SLAB_BYTES, best.page_bytes))


def groups(
    layers_of: Mapping[KvGeometry, list[int]], pages: KvPages, element_bytes: int, bfloat: bool
) -> tuple[KvGroupLayout, ...]:
    """The groups of a choice: the layers of a geometry in order, in parts of nearly equal size."""
    found = []
    for (geometry, layers), page_tokens, n_groups in zip(
        layers_of.items(), pages.page_tokens, pages.n_groups, strict=True
    ):
        for i in range(n_groups):
            part = layers[i * len(layers) // n_groups : (i + 1) * len(layers) // n_groups]
            found.append(
                KvGroupLayout(
                    layers=tuple(part),
                    n_head_kv=geometry.n_head_kv,
                    key_dim=geometry.key_dim,
                    value_dim=geometry.value_dim,
                    page_tokens=page_tokens,
                    window=geometry.window,
                    element_bytes=element_bytes,
                    bfloat=bfloat,
                )
            )
    return tuple(found)


def _classes(layers_of: Mapping[KvGeometry, list[int]], element_bytes: int) -> list[_Class]:
    return [_Class(len(layers), geometry.token_elements * element_bytes) for geometry, layers in layers_of.items()]


def _choices(classes: list[_Class], sizes: Iterable[int], lowest: int, highest: int) -> Iterator[KvPages]:
    smallest = min(cls.token_bytes for cls in classes)
    largest = sum(cls.n_layers * cls.token_bytes for cls in classes) * MAX_TOKEN_MULTIPLE
    for size in sizes:
        if size < lowest * smallest:
            continue
        # Larger pages than the whole model's tokens would only be wasted.
        for tokens in range(lowest, min(highest, size // smallest) + 1):
            if size > 2 * largest * tokens:
                continue
            parts = [_fit(cls, size, tokens, highest * MAX_TOKEN_MULTIPLE, len(classes) > 1) for cls in classes]
            fits = [part for part in parts if part is not None]
            # One geometry has exactly `tokens`: common multiples come up under their own number.
            if len(fits) == len(classes) and min(fit[0] for fit in fits) == tokens:
                yield KvPages(size, tuple(f[0] for f in fits), tuple(f[1] for f in fits), max(f[2] for f in fits))


def _fit(cls: _Class, page_bytes: int, tokens: int, most_tokens: int, multiples: bool) -> tuple[int, int, float] | None:
    """(tokens, groups, waste) of one geometry in pages of this size: few groups first, then little waste.

    Geometries that share the page size may take a multiple of the others' tokens, so that block borders still meet.
    """
    best: tuple[int, int, float] | None = None
    for multiple in range(1, MAX_TOKEN_MULTIPLE + 1 if multiples else 2):
        page_tokens = multiple * tokens
        n_fit = page_bytes // (page_tokens * cls.token_bytes)
        if n_fit == 0 or page_tokens > most_tokens:
            break
        n_groups = ceil_div(cls.n_layers, n_fit)
        waste = 1 - page_tokens * cls.token_bytes * cls.n_layers / (n_groups * page_bytes)
        if best is None or (waste >= MAX_WASTE, n_groups, waste) < (best[2] >= MAX_WASTE, best[1], best[2]):
            best = page_tokens, n_groups, waste
    return best


def _best(choices: Iterable[KvPages]) -> KvPages | None:
    """The fewest groups; then waste in steps of 2%, as a shorter page leaves less unused at a sequence's end."""

    def key(pages: KvPages) -> tuple[object, ...]:
        too_much = pages.waste if pages.waste >= MAX_WASTE else 0.0
        shared_tokens = math.lcm(*pages.page_tokens)
        return too_much, sum(pages.n_groups), shared_tokens > 256, int(pages.waste * 50), shared_tokens, pages.waste

    return min(choices, key=key, default=None)
