"""What a model is, how the pool would be laid out for it, and what fits: `rimuru inspect`. Reads headers only.

Plans every architecture that can be described, also those that cannot run yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rimuru.arch.common import Gguf
from rimuru.arch.registry import can_run, read_config
from rimuru.arch.spec import DenseFfnSpec, ModelConfig, MoeSpec
from rimuru.arch.tensors import check_tensors, expert_tensors, model_tensors
from rimuru.base.units import ceil_div, human_bytes
from rimuru.formats.gguf import TensorInfo
from rimuru.formats.quants import ENGINE_FORMATS
from rimuru.memory.planner import notes, plan_layout, waste
from rimuru.memory.specs import PageKind, PoolLayout

CONTEXTS_TOKENS = (1024, 4096, 16384, 65536, 262144)
PAGE_KINDS: tuple[PageKind, ...] = ("expert", "ssm", "kv", "conv")
DEFAULT_CHUNK_TOKENS = 512
_LOGIT_ROWS = 64


def inspect_model(
    gguf: Gguf,
    kv_element_bytes: int,
    memory_bytes: int | None,
    scratch_bytes: int | None = None,
    kept_experts: int | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Facts, layout and fit of a model (an open file, or shapes.shape_gguf) as a dict for JSON.

    memory_bytes: everything on the device (dense weights, scratch, pool); None = no limit, then no requests are
    counted. scratch_bytes: what a backend says it needs; None = an estimate. kept_experts: so many stay, and no others;
    None = as many as fit. context: the longest request to count; None = the model's.
    Raises FileFormatError and UnsupportedModelError as read_config and check_tensors do.
    """
    config = read_config(gguf)
    check_tensors(config, gguf)
    layout = plan_layout(config, gguf, kv_element_bytes)
    dense_bytes = dense_weight_bytes(config, gguf.tensors)
    scratch = estimate_scratch_bytes(config) if scratch_bytes is None else scratch_bytes
    pool_bytes = None if memory_bytes is None else max(0, memory_bytes - dense_bytes - scratch)
    wasted = waste(layout)
    types: dict[str, int] = {}
    for info in gguf.tensors.values():
        types[info.format.name] = types.get(info.format.name, 0) + info.n_bytes
    return {
        "architecture": config.architecture,
        "name": config.name,
        "runnable": can_run(config.architecture) and all(_can_compute(info, config) for info in gguf.tensors.values()),
        "model": _model_facts(config),
        "bytes": {
            "file": sum(info.n_bytes for info in gguf.tensors.values()),
            "dense": dense_bytes,
            "experts": _expert_bytes(config, gguf.tensors),
            "scratch": scratch,
            "pool": pool_bytes,
        },
        "dense_bytes": dense_bytes,
        "bytes_per_token": token_bytes(config, gguf.tensors, dense_bytes),
        "tensor_types": types,
        "layout": {
            "page_bytes": {"huge": layout.huge_bytes} | {kind: layout.page_bytes(kind) for kind in PAGE_KINDS},
            "waste_fraction": wasted["fraction"],
            "waste_by_kind": wasted["by_kind"],
            "pages_per_expert": _pages_per_expert(layout),
            "kv_groups": _kv_groups(layout),
        },
        "fits": _fits(config, layout, pool_bytes, kept_experts, context),
        "notes": _notes(config, layout, memory_bytes, pool_bytes),
    }


def dense_weight_bytes(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all weights that stay resident: everything but routed experts and what logits do not depend on."""
    experts = {part.tensor for parts in expert_tensors(config).values() for part in parts}
    return sum(tensors[name].n_bytes for name in model_tensors(config) if name not in experts)


def token_bytes(config: ModelConfig, tensors: Mapping[str, TensorInfo], dense_bytes: int) -> dict[str, int]:
    """Bytes of weights that a step with one token reads: `dense` (of a separate embedding table one row, which is left
    out) and `experts` (the chosen ones, shared ones are dense)."""
    embedding = tensors["token_embd.weight"].n_bytes if "output.weight" in tensors else 0
    chosen = 0
    parts = expert_tensors(config)
    for layer in config.moe_layers:
        if isinstance(layer.ffn, MoeSpec):
            n_bytes = sum(tensors[name].n_bytes for name in {part.tensor for part in parts[layer.index]})
            chosen += n_bytes * layer.ffn.top_k // layer.ffn.n_experts
    return {"dense": dense_bytes - embedding, "experts": chosen}


def estimate_scratch_bytes(config: ModelConfig, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
    """Activations of a prefill chunk and logits of a batch, in float32: an estimate before a backend is chosen."""
    widest = 0
    for layer in config.layers:
        spec = layer.ffn
        if isinstance(spec, DenseFfnSpec):
            widest = max(widest, 3 * spec.width)
        elif isinstance(spec, MoeSpec):
            widest = max(widest, spec.top_k * (3 * spec.width + config.n_embd) + spec.n_experts)
    return 4 * (chunk_tokens * (8 * config.n_embd + widest) + _LOGIT_ROWS * config.n_vocab)


def request_pages(layout: PoolLayout, n_tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> dict[str, int]:
    """Pages of a request of n_tokens, by kind (conv: single rows). Layers with a window keep what a chunk can see."""
    pages: dict[str, int] = dict.fromkeys(PAGE_KINDS, 0)
    if layout.kv is not None:
        for group in layout.kv.groups:
            kept = n_tokens if group.window is None else min(n_tokens, group.window + chunk_tokens)
            pages["kv"] += ceil_div(kept, group.page_tokens) + (kept < n_tokens)
    if layout.ssm is not None:
        pages["ssm"] = len(layout.ssm.layers)
    if layout.conv is not None:
        pages["conv"] = len(layout.conv.layers) * layout.conv.n_rows
    return pages


def huge_pages_for(layout: PoolLayout, pages: Mapping[str, int]) -> int:
    """Huge pages that hold these pages, when nothing is scattered. Conv pages come in runs of n_rows."""
    parents = {"expert": pages.get("expert", 0), "ssm": pages.get("ssm", 0), "slab": 0}
    for kind, part in (("kv", layout.kv), ("conv", layout.conv)):
        if part is None or not pages.get(kind):
            continue
        parent = "slab" if layout.slab_bytes else part.parent
        parent_bytes = layout.slab_bytes or layout.page_bytes(part.parent)
        run = layout.conv.n_rows if kind == "conv" and layout.conv is not None else 1
        per_parent = parent_bytes // part.page_bytes // run * run
        parents[parent] += ceil_div(pages[kind], per_parent)
    sizes = {"expert": layout.page_bytes("expert"), "ssm": layout.page_bytes("ssm"), "slab": layout.slab_bytes}
    return sum(ceil_div(n * sizes[parent], layout.huge_bytes) for parent, n in parents.items() if n)


def requests_that_fit(layout: PoolLayout, n_huge: int, n_tokens: int, expert_pages: int = 0) -> int:
    """How many requests of n_tokens fit beside this many expert pages in a pool of n_huge huge pages."""
    one = request_pages(layout, n_tokens)

    def fits(n: int) -> bool:
        need = {kind: n * count for kind, count in one.items()}
        return huge_pages_for(layout, need | {"expert": expert_pages}) <= n_huge

    if not any(one.values()) or not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _can_compute(info: TensorInfo, config: ModelConfig) -> bool:
    return info.name in config.ignored_tensors or info.format in ENGINE_FORMATS


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    moe = [layer.ffn for layer in config.moe_layers if isinstance(layer.ffn, MoeSpec)]
    mixers: dict[str, int] = {}
    for layer in config.layers:
        if layer.mixer is not None:
            kind = type(layer.mixer).__name__.removesuffix("Spec").lower()
            mixers[kind] = mixers.get(kind, 0) + 1
    return {
        "layers": len(config.layers),
        "mtp_blocks": config.n_mtp_blocks,
        "mixers": mixers,
        "moe_layers": len(moe),
        "experts": moe[0].n_experts if moe else 0,
        "experts_per_token": moe[0].top_k if moe else 0,
        "embedding_length": config.n_embd,
        "vocabulary": config.n_vocab,
        "context_length": config.context_length,
    }


def _expert_bytes(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> int:
    return sum(tensors[name].n_bytes for name in {p.tensor for parts in expert_tensors(config).values() for p in parts})


def _pages_per_expert(layout: PoolLayout) -> float:
    return layout.expert.n_pages / layout.expert.n_experts if layout.expert else 0.0


def _kv_groups(layout: PoolLayout) -> list[dict[str, Any]]:
    if layout.kv is None:
        return []
    return [
        {"layers": len(group.layers), "page_tokens": group.page_tokens, "window": group.window, "type": group.element}
        for group in layout.kv.groups
    ]


def _fits(
    config: ModelConfig, layout: PoolLayout, pool_bytes: int | None, kept_experts: int | None, context: int | None
) -> dict[str, Any]:
    """resident_experts: beside nothing else. requests_by_context: with two layers' worth of a token's experts left, and
    beside the experts that stay."""
    total = layout.expert.n_experts if layout.expert else 0
    if pool_bytes is None:
        return {"resident_experts": total, "total_experts": total, "requests_by_context": {}, "huge_pages": None}
    n_huge = pool_bytes // layout.huge_bytes
    resident, floor_pages = 0, 0
    if layout.expert is not None:
        n_pages = n_huge * (layout.huge_bytes // layout.expert.page_bytes)
        resident = min(total, int(n_pages / _pages_per_expert(layout)))
        top_k = max(layer.ffn.top_k for layer in config.moe_layers if isinstance(layer.ffn, MoeSpec))
        floor_pages = 2 * top_k * layout.expert.max_pages
        if kept_experts is not None:
            resident = min(resident, kept_experts)
            floor_pages += int(kept_experts * _pages_per_expert(layout))
    longest = context or config.context_length
    contexts = sorted({n for n in CONTEXTS_TOKENS if n < longest} | {longest})
    by_context = {str(n): requests_that_fit(layout, n_huge, n, floor_pages) for n in contexts}
    return {
        "resident_experts": resident,
        "total_experts": total,
        "requests_by_context": by_context,
        "huge_pages": n_huge,
    }


def _notes(config: ModelConfig, layout: PoolLayout, memory_bytes: int | None, pool_bytes: int | None) -> list[str]:
    found = []
    if not can_run(config.architecture):
        found.append(f"architecture {config.architecture} can be planned, but not run yet")
    if config.n_mtp_blocks:
        found.append(f"{config.n_mtp_blocks} multi-token-prediction block(s) are left unused")
    if pool_bytes is None or memory_bytes is None:
        return found
    if pool_bytes < layout.huge_bytes:
        found.append(f"{human_bytes(memory_bytes)} cannot hold the dense weights and one huge page; raise --memory")
        return found
    return found + notes(layout, pool_bytes)


def format_report(report: Mapping[str, Any]) -> str:
    """The report of inspect_model as text for people."""
    model, sizes, layout, fits = report["model"], report["bytes"], report["layout"], report["fits"]
    mixers = ", ".join(f"{n} {kind}" for kind, n in model["mixers"].items())
    lines = [
        f"{report['name']}  ({report['architecture']}, {'runnable' if report['runnable'] else 'cannot run yet'})",
        f"  layers      {model['layers']} ({mixers})",
        f"  experts     {model['moe_layers']} layers x {model['experts']}, {model['experts_per_token']} per token"
        if model["experts"]
        else "  experts     none",
        f"  weights     {human_bytes(sizes['dense'])} dense, {human_bytes(sizes['experts'])} experts",
        f"  scratch     {human_bytes(sizes['scratch'])} (estimated: a start counts what its device needs)",
        "  types       "
        + ", ".join(
            f"{name} {human_bytes(n)}" for name, n in sorted(report["tensor_types"].items(), key=lambda t: -t[1])
        ),
        "  pages       " + ", ".join(f"{kind} {human_bytes(n)}" for kind, n in layout["page_bytes"].items() if n),
    ]
    if layout["pages_per_expert"]:
        lines.append(f"              {layout['pages_per_expert']:.2f} pages per expert")
    wasted = ", ".join(f"{kind} {fraction:.1%}" for kind, fraction in layout["waste_by_kind"].items())
    lines.append(f"  waste       {layout['waste_fraction']:.1%} at worst ({wasted})")
    if sizes["pool"] is not None:
        lines.append(f"  pool        {human_bytes(sizes['pool'])}, {fits['huge_pages']} huge pages")
    if sizes["pool"] is not None and report.get("starts", True):  # else a note says why not
        if fits["total_experts"]:
            lines.append(f"  residents   {fits['resident_experts']} of {fits['total_experts']} experts")
        counts = ", ".join(f"{n} x {context}" for context, n in fits["requests_by_context"].items())
        lines.append(f"  requests    {counts} tokens")
    return "\n".join(lines + [f"  note        {note}" for note in report["notes"]])
