"""The layout planner: page sizes and contents of the pool, from the model's tensors alone.

Rule, among layouts that waste under 5% of every kind's pages: a huge page of which a pool of 4 GiB holds 64, then the
fewest pages per expert, then the least waste, then the smallest huge page. lcm(P_e, P_s) is large where the two share
few factors; padding of P_s is the means to get under the limit, and below it a smaller huge page is worth no padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rimuru.arch.common import Gguf
from rimuru.arch.spec import ModelConfig, MoeSpec
from rimuru.arch.tensors import expert_tensors
from rimuru.base.errors import FileFormatError
from rimuru.base.units import GIB, KIB, align_up, ceil_div, human_bytes
from rimuru.formats.gguf import TensorInfo
from rimuru.memory import planner_kv
from rimuru.memory.planner_kv import MAX_WASTE, PAGE_ALIGNMENT_BYTES
from rimuru.memory.specs import (
    ConvLayout,
    ExpertLayerLayout,
    ExpertLayout,
    KvGeometry,
    KvLayout,
    PoolLayout,
    ProjectionLayout,
    SsmLayout,
    conv_shape,
    kv_geometries,
    state_bytes,
)

EXPERT_PAGE_ALIGNMENT_BYTES = 4 * KIB
SSM_PAGE_ALIGNMENT_BYTES = 256
MIN_HUGE_PAGES = 64
HUGE_LIMIT_BYTES = 4 * GIB // MIN_HUGE_PAGES
MAX_PAGES_PER_PROJECTION = 64
_LEAST_KV_TOKENS = 8
_MAX_KV_ELEMENT_BYTES = 4
_MAX_SSM_DIVISOR = 64
_MAX_EXPERT_PAGE_STEPS = 96
_MAX_PAGE_COUNTS = 8
TensorTable = Mapping[str, TensorInfo]
Parent = Literal["expert", "ssm"]


def plan_layout(
    config: ModelConfig, model: Gguf | TensorTable, kv_element_bytes: int, bfloat: bool = False
) -> PoolLayout:
    """The pool's layout for a model: a file, a built-in shape, or a table of tensors.

    kv_element_bytes: 2 or 4 (`bfloat`: bf16 instead of f16). Expert and SSM pages do not depend on it.
    Raises FileFormatError where expert tensors are missing or of another shape than the description says.
    """
    tensors: TensorTable = model if isinstance(model, Mapping) else model.tensors
    layers = _expert_layers(config, tensors)
    states = _states(config)
    layers_of = _layers_of(config)
    token_bytes = max((geometry.token_elements for geometry in layers_of), default=0) * _MAX_KV_ELEMENT_BYTES
    upper = _plan_upper(layers, states, max(_LEAST_KV_TOKENS * token_bytes, states.n_rows * states.row_bytes))
    expert = _expert_layout(layers, upper.expert_bytes) if layers else None
    ssm = SsmLayout(upper.ssm_bytes, states.state_bytes, states.ssm_layers) if upper.ssm_bytes else None
    conv = None
    if upper.conv_bytes:
        conv = ConvLayout(upper.conv_bytes, states.row_bytes, states.n_rows, states.conv_layers, upper.conv_parent)
    huge_bytes, kv, slab_bytes = upper.huge_bytes, None, 0
    if layers_of and huge_bytes:
        kv = _kv_layout(layers_of, upper, kv_element_bytes, bfloat)
    elif layers_of:
        pages, slab_bytes = planner_kv.choose_free(layers_of, kv_element_bytes)
        groups = planner_kv.groups(layers_of, pages, kv_element_bytes, bfloat)
        kv = KvLayout(pages.page_bytes, groups, "expert")
    if not huge_bytes:
        if states.conv_layers:  # short convolutions without experts: their pages come from the slab too
            page_bytes = align_up(states.row_bytes, PAGE_ALIGNMENT_BYTES)
            slab_bytes = math.lcm(slab_bytes or page_bytes, page_bytes * states.n_rows)
            conv = ConvLayout(page_bytes, states.row_bytes, states.n_rows, states.conv_layers, "expert")
        huge_bytes = slab_bytes
    return PoolLayout(huge_bytes, expert, kv, ssm, conv, slab_bytes)


def waste(layout: PoolLayout) -> dict[str, float | dict[str, float]]:
    """{"fraction": at the worst mix of kinds, "by_kind": {kind: 1 - useful / allocated bytes}}.

    Pages of one kind fill their parents and the pool without a rest, so the worst mix is a pool of the worst kind.
    Experts count as the mean over all of them, conv pages with what a parent page has left over.
    """
    by_kind: dict[str, float] = {}
    if layout.expert is not None:
        useful = sum(layer.n_experts * layer.useful_bytes for layer in layout.expert.layers)
        by_kind["expert"] = 1 - useful / (layout.expert.n_pages * layout.expert.page_bytes)
    if layout.ssm is not None:
        by_kind["ssm"] = 1 - layout.ssm.state_bytes / layout.ssm.page_bytes
    if layout.kv is not None:
        by_geometry: dict[tuple[object, ...], list[int]] = {}
        for group in layout.kv.groups:
            key = (group.n_head_kv, group.key_dim, group.value_dim, group.window)
            by_geometry.setdefault(key, []).append(group.useful_bytes)
        by_kind["kv"] = max(1 - sum(used) / (len(used) * layout.kv.page_bytes) for used in by_geometry.values())
    if layout.conv is not None:
        parent_bytes = layout.slab_bytes or layout.page_bytes(layout.conv.parent)
        by_kind["conv"] = _conv_waste(parent_bytes, layout.conv.page_bytes, layout.conv.row_bytes, layout.conv.n_rows)
    return {"fraction": max(by_kind.values(), default=0.0), "by_kind": by_kind}


def notes(layout: PoolLayout, pool_bytes: int) -> list[str]:
    """What a user should know about this layout in a pool of this size; empty where all is well."""
    found = []
    n_huge = pool_bytes // layout.huge_bytes
    if n_huge < MIN_HUGE_PAGES:
        found.append(
            f"the pool of {human_bytes(pool_bytes)} holds only {n_huge} huge pages "
            f"of {human_bytes(layout.huge_bytes)}; with fewer than {MIN_HUGE_PAGES} memory moves in coarse steps"
        )
    wasted = waste(layout)["by_kind"]
    assert isinstance(wasted, dict)
    for kind, fraction in wasted.items():
        if fraction >= MAX_WASTE:
            found.append(f"{fraction:.1%} of the {kind} pages' bytes are padding")
    return found


# ---------------------------------------------------------------- experts
@dataclass(frozen=True, slots=True)
class _ExpertLayer:
    index: int
    n_experts: int
    projections: tuple[ProjectionLayout, ...]
    """With rows_per_page, n_pages and first_page still 0."""


def _expert_layers(config: ModelConfig, tensors: TensorTable) -> list[_ExpertLayer]:
    found = []
    wanted = expert_tensors(config)
    for layer in config.moe_layers:
        assert isinstance(layer.ffn, MoeSpec)
        projections = []
        for part in wanted[layer.index]:
            info = tensors.get(part.tensor)
            shape = (part.n_in, part.tensor_rows, layer.ffn.n_experts)
            if info is None or info.shape + (1,) * (3 - len(info.shape)) != shape:
                what = "is missing" if info is None else f"has shape {list(info.shape)}, expected {list(shape)}"
                raise FileFormatError(f"expert tensor {part.tensor} {what}")
            projections.append(
                ProjectionLayout(
                    part.projection, part.tensor, part.tensor_row, part.tensor_rows, part.n_rows, part.n_in,
                    info.row_bytes, info.format, 0, 0, 0,
                )
            )  # fmt: skip
        found.append(_ExpertLayer(layer.index, layer.ffn.n_experts, tuple(projections)))
    return found


def _expert_layout(layers: list[_ExpertLayer], page_bytes: int) -> ExpertLayout:
    found = []
    for layer in layers:
        first_page, placed = 0, []
        for part in layer.projections:
            rows_per_page = page_bytes // part.row_bytes
            n_pages = ceil_div(part.n_rows, rows_per_page)
            placed.append(replace(part, rows_per_page=rows_per_page, n_pages=n_pages, first_page=first_page))
            first_page += n_pages
        found.append(ExpertLayerLayout(layer.index, layer.n_experts, first_page, tuple(placed)))
    return ExpertLayout(page_bytes, tuple(found))


@dataclass(frozen=True, slots=True)
class _ExpertPage:
    page_bytes: int
    pages_per_expert: float
    waste: float


class _Experts:
    """Pages and waste of all experts as functions of the page size, over the distinct projections."""

    def __init__(self, layers: list[_ExpertLayer]) -> None:
        self.n_experts = sum(layer.n_experts for layer in layers)
        self.counts: dict[tuple[int, int], int] = {}
        for layer in layers:
            for part in layer.projections:
                key = (part.n_rows, part.row_bytes)
                self.counts[key] = self.counts.get(key, 0) + layer.n_experts
        self.useful_bytes = sum(n_rows * row_bytes * n for (n_rows, row_bytes), n in self.counts.items())

    def page(self, page_bytes: int) -> _ExpertPage | None:
        """None where not even one row fits."""
        n_pages = 0
        for (n_rows, row_bytes), n in self.counts.items():
            rows_per_page = page_bytes // row_bytes
            if rows_per_page == 0:
                return None
            n_pages += n * ceil_div(n_rows, rows_per_page)
        return _ExpertPage(page_bytes, n_pages / self.n_experts, 1 - self.useful_bytes / (n_pages * page_bytes))

    def candidates(self, least_bytes: int) -> list[_ExpertPage]:
        """The smallest page of every page count that wastes little, fewest pages first; else the least wasteful one.

        No page is smaller than least_bytes: what is carved from it must fit (it does in all but toy models).
        """
        sizes = set()
        least_bytes = align_up(least_bytes, EXPERT_PAGE_ALIGNMENT_BYTES)
        for n_rows, row_bytes in self.counts:
            for n_pages in range(1, min(n_rows, MAX_PAGES_PER_PROJECTION) + 1):
                size = align_up(ceil_div(n_rows, n_pages) * row_bytes, EXPERT_PAGE_ALIGNMENT_BYTES)
                sizes.add(max(size, least_bytes))
        pages = [page for page in map(self.page, sorted(sizes)) if page is not None]
        good = [page for page in pages if page.waste < MAX_WASTE]
        if not good:
            return [min(pages, key=lambda page: page.waste)]
        smallest: dict[float, _ExpertPage] = {}
        for page in good:  # sizes ascend: the first of a count is the smallest
            smallest.setdefault(page.pages_per_expert, page)
        return [smallest[count] for count in sorted(smallest)]

    def padded(self, smallest: _ExpertPage) -> Iterator[_ExpertPage]:
        """Larger pages that give as many pages per expert and stay under the waste limit."""
        most_bytes = int(self.useful_bytes / (smallest.pages_per_expert * self.n_experts * (1 - MAX_WASTE)))
        step = EXPERT_PAGE_ALIGNMENT_BYTES
        step *= max(1, (most_bytes - smallest.page_bytes) // step // _MAX_EXPERT_PAGE_STEPS)
        for size in range(smallest.page_bytes + step, most_bytes, step):
            page = self.page(size)
            if page is not None and page.pages_per_expert == smallest.pages_per_expert and page.waste < MAX_WASTE:
                yield page


# ---------------------------------------------------------------- the upper levels: experts, states, convolutions
@dataclass(frozen=True, slots=True)
class _States:
    state_bytes: int
    ssm_layers: tuple[int, ...]
    row_bytes: int
    n_rows: int
    conv_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Upper:
    """Sizes of the L1 and L2 pages and of the conv pages; 0 where the model has none."""

    expert_bytes: int = 0
    ssm_bytes: int = 0
    huge_bytes: int = 0
    conv_bytes: int = 0
    conv_parent: Parent = "expert"
    wastes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of experts, SSM pages and conv pages."""

    @property
    def key(self) -> tuple[object, ...]:
        """Orders layouts with equally many pages per expert."""
        over_waste = sum(max(0.0, part - MAX_WASTE) for part in self.wastes)
        over_limit = max(0, self.huge_bytes - HUGE_LIMIT_BYTES)
        expert, ssm, conv = self.wastes
        return over_waste, over_limit, round(expert + ssm, 4), round(conv, 4), self.huge_bytes

    @property
    def is_good(self) -> bool:
        return self.key[0] == 0 and self.key[1] == 0


def _states(config: ModelConfig) -> _States:
    ssm = {layer.index: state_bytes(layer.mixer) for layer in config.layers if state_bytes(layer.mixer)}
    conv = {layer.index: shape for layer in config.layers if (shape := conv_shape(layer.mixer)) is not None}
    return _States(
        state_bytes=max(ssm.values(), default=0),
        ssm_layers=tuple(ssm),
        row_bytes=max((row_bytes for _, row_bytes in conv.values()), default=0),
        n_rows=max((n_rows for n_rows, _ in conv.values()), default=0),
        conv_layers=tuple(conv),
    )


def _plan_upper(layers: list[_ExpertLayer], states: _States, least_bytes: int) -> _Upper:
    if not layers:
        if not states.state_bytes:
            return _Upper()
        return min(_with_states(None, states), key=lambda upper: upper.key)
    experts = _Experts(layers)
    best: _Upper | None = None
    for smallest in experts.candidates(least_bytes)[:_MAX_PAGE_COUNTS]:
        found = min(_with_states(smallest, states), key=lambda upper: upper.key)
        if not found.is_good:
            padded = (upper for page in experts.padded(smallest) for upper in _with_states(page, states))
            found = min((found, *padded), key=lambda upper: upper.key)
        if found.is_good:
            return found
        if best is None or found.key < best.key:
            best = found
    assert best is not None
    return best


def _with_states(page: _ExpertPage | None, states: _States) -> Iterator[_Upper]:
    """All layouts of the upper levels with this expert page."""
    expert_bytes = page.page_bytes if page else 0
    expert_waste = page.waste if page else 0.0
    for ssm_bytes in _ssm_sizes(expert_bytes, states):
        huge_bytes = math.lcm(*(size for size in (expert_bytes, ssm_bytes) if size))
        ssm_waste = 1 - states.state_bytes / ssm_bytes if ssm_bytes else 0.0
        conv_bytes, parent, conv_waste = _conv_page(expert_bytes, ssm_bytes, states)
        yield _Upper(expert_bytes, ssm_bytes, huge_bytes, conv_bytes, parent, (expert_waste, ssm_waste, conv_waste))


def _ssm_sizes(expert_bytes: int, states: _States) -> set[int]:
    """SSM pages to consider: the plain size, those that give a small multiple of the expert page, and, where there are
    no experts to go with, whole numbers of conv rows."""
    if not states.state_bytes:
        return {0}
    plain = align_up(states.state_bytes, SSM_PAGE_ALIGNMENT_BYTES)
    most = int(states.state_bytes / (1 - MAX_WASTE))
    sizes = {plain}
    if not expert_bytes:
        if states.row_bytes:
            unit = align_up(states.row_bytes, SSM_PAGE_ALIGNMENT_BYTES)
            sizes.update(range(align_up(plain, unit), most + 1, unit))
        return sizes
    for divisor in range(1, _MAX_SSM_DIVISOR + 1):
        unit, rest = divmod(expert_bytes, divisor)
        if rest == 0 and unit % SSM_PAGE_ALIGNMENT_BYTES == 0:
            sizes.update(range(align_up(plain, unit), most + 1, unit))
    return sizes


def _conv_page(expert_bytes: int, ssm_bytes: int, states: _States) -> tuple[int, Parent, float]:
    """(bytes, parent, waste) of the conv page; SSM pages are the parent by preference, as requests own both."""
    if not states.row_bytes:
        return 0, "expert", 0.0
    best: tuple[int, Parent, float] | None = None
    parents: tuple[tuple[Parent, int], ...] = (("ssm", ssm_bytes), ("expert", expert_bytes))
    for parent, parent_bytes in parents:
        page_bytes = _dividing_page(parent_bytes, states.row_bytes, states.n_rows)
        if page_bytes:
            wasted = _conv_waste(parent_bytes, page_bytes, states.row_bytes, states.n_rows)
            if best is None or (best[2] >= MAX_WASTE and wasted < best[2]):
                best = page_bytes, parent, wasted
    # No row fits in a page: a model without such rows is not known; the layout would have to be refused.
    if best is None:
        raise FileFormatError(
            f"convolution rows of {states.row_bytes} bytes do not fit in pages of {expert_bytes} bytes"
        )
    return best


def _dividing_page(parent_bytes: int, row_bytes: int, n_rows: int) -> int:
    """The divisor of a parent page that holds a row with the least waste; 0 where no run of n_rows fits."""
    sizes = [
        parent_bytes // n
        for n in range(parent_bytes // row_bytes, n_rows - 1, -1)
        if parent_bytes % n == 0 and parent_bytes // n % PAGE_ALIGNMENT_BYTES == 0
    ][:4]
    return min(sizes, key=lambda size: _conv_waste(parent_bytes, size, row_bytes, n_rows), default=0)


def _conv_waste(parent_bytes: int, page_bytes: int, row_bytes: int, n_rows: int) -> float:
    n_runs = parent_bytes // page_bytes // n_rows
    return 1 - n_runs * n_rows * row_bytes / parent_bytes


# ---------------------------------------------------------------- KV
def _layers_of(config: ModelConfig) -> dict[KvGeometry, list[int]]:
    found: dict[KvGeometry, list[int]] = {}
    for layer in config.layers:
        for geometry in kv_geometries(layer.mixer):
            found.setdefault(geometry, []).append(layer.index)
    return found


def _kv_layout(layers_of: dict[KvGeometry, list[int]], upper: _Upper, element_bytes: int, bfloat: bool) -> KvLayout:
    """KV pages come from expert pages where those waste little: a cache that grows then takes one expert page."""
    best: tuple[planner_kv.KvPages, Parent] | None = None
    parents: tuple[tuple[Parent, int], ...] = (("expert", upper.expert_bytes), ("ssm", upper.ssm_bytes))
    for parent, parent_bytes in parents:
        pages = planner_kv.choose_in_parent(layers_of, element_bytes, parent_bytes) if parent_bytes else None
        if pages is not None and (best is None or (best[0].waste >= MAX_WASTE and pages.waste < best[0].waste)):
            best = pages, parent
    if best is None:
        raise FileFormatError("one token's keys and values do not fit in a page; the head widths cannot be right")
    pages, parent = best
    groups = planner_kv.groups(layers_of, pages, element_bytes, bfloat)
    return KvLayout(pages.page_bytes, groups, parent)
