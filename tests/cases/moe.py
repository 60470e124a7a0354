"""Cases of routing and of the experts: shuffled page tables, mixed types, biases, absent and repeated experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cases.common import Case, Inputs, Outputs, address_of, normal, poisoned
from cases.matmul import TOLERANCES, filled_act, random_rows
from rimuru.arch.spec import MoeSpec
from rimuru.base.units import ceil_div
from rimuru.formats.quants import BY_NAME
from rimuru.memory.specs import ExpertLayerLayout, ProjectionLayout
from rimuru.ops.base import ExpertTable, Ops

PAGE_ALIGN = 4096

EXPERT_TOLERANCE = 0.3
"""Of the greatest error of an output: rounding to 8 bits twice, with a product of two rounded sums between."""


def expert_layout(
    formats: dict[str, str], n_experts: int, n_in: int, n_hidden: int, page_bytes: int
) -> ExpertLayerLayout:
    """Layout of a layer whose projections have these types ("gate" may be absent), in pages of page_bytes."""
    projections = []
    first_page = 0
    for name in ("gate", "up", "down"):
        if name not in formats:
            continue
        fmt = BY_NAME[formats[name]]
        n_rows, width = (n_in, n_hidden) if name == "down" else (n_hidden, n_in)
        row_bytes = fmt.row_bytes(width)
        rows_per_page = min(n_rows, page_bytes // row_bytes)
        n_pages = ceil_div(n_rows, rows_per_page)
        projections.append(
            ProjectionLayout(
                name=name,  # type: ignore[arg-type]
                tensor=f"blk.0.ffn_{name}_exps.weight", tensor_row=0, tensor_rows=n_rows, n_rows=n_rows, n_in=width,
                row_bytes=row_bytes, format=fmt, rows_per_page=rows_per_page, n_pages=n_pages, first_page=first_page,
            )
        )  # fmt: skip
        first_page += n_pages
    return ExpertLayerLayout(0, n_experts, first_page, tuple(projections))


def fill_pool(rng: np.random.Generator, layout: ExpertLayerLayout, page_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(pool image, page ids [n_experts, n_pages]) of random experts in shuffled pages; the rest is NaN patterns."""
    n_pages = layout.n_experts * layout.n_pages + 3
    pages = rng.permutation(n_pages)[: n_pages - 3].reshape(layout.n_experts, layout.n_pages)
    pool = poisoned(n_pages * page_bytes)
    for expert in range(layout.n_experts):
        for p in layout.projections:
            raw = random_rows(rng, p.format, p.n_rows, p.n_in).reshape(p.n_rows, -1)
            for start in range(0, p.n_rows, p.rows_per_page):
                part = raw[start : start + p.rows_per_page].reshape(-1)
                at = int(pages[expert, p.first_page + start // p.rows_per_page]) * page_bytes
                pool[at : at + part.size] = part
    return pool, pages


def expert_table(ops: Ops, inputs: Inputs) -> tuple[ExpertTable, Any]:
    """(table, uploaded pool); the pool must live as long as the table is used."""
    pool = ops.upload(inputs["pool"])
    addresses = address_of(pool) + inputs["pages"].astype(np.int64) * inputs["page_bytes"]
    biases = {name: ops.upload(values) for name, values in inputs["biases"].items()}
    factors = {name: ops.upload(values) for name, values in inputs["factors"].items()}
    return ExpertTable(inputs["layout"], inputs["page_bytes"], ops.upload(addresses), biases, factors), pool


def experts_case(
    name: str,
    formats: dict[str, str],
    spec: MoeSpec,
    n_in: int,
    n_tokens: int,
    *,
    page_bytes: int = PAGE_ALIGN,
    biases: bool = False,
    factors: bool = False,
    active: bool = False,
    repeated: bool = False,
    x_scale: float = 1.0,
    kind: Any = "edge",
) -> Case:
    """moe_experts, then moe_combine. active: two in three experts only; repeated: an expert twice in a token's row."""
    layout = expert_layout(formats, spec.n_experts, n_in, spec.width, page_bytes)

    def make_inputs(rng: np.random.Generator) -> Inputs:
        pool, pages = fill_pool(rng, layout, page_bytes)
        ids = np.stack([rng.permutation(spec.n_experts)[: spec.top_k] for _ in range(n_tokens)]).astype(np.int32)
        if repeated:
            ids[:, -1] = ids[:, 0]
        return {
            "x": normal(rng, n_tokens, n_in, scale=x_scale), "ids": ids, "pool": pool, "pages": pages,
            "weights": rng.uniform(0.1, 1, (n_tokens, spec.top_k)).astype(np.float32),
            "before": normal(rng, n_tokens, n_in), "layout": layout, "page_bytes": page_bytes,
            "active": rng.permutation(spec.n_experts) % 3 != 0 if active else None,
            "biases": {p.name: normal(rng, spec.n_experts, p.n_rows) for p in layout.projections} if biases else {},
            "factors": {
                p.name: rng.uniform(0.25, 4, spec.n_experts).astype(np.float32) for p in layout.projections
            } if factors else {},
        }  # fmt: skip

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        table, pool = expert_table(ops, inputs)
        scratch = ops.moe_scratch(n_tokens, spec, n_in)
        scratch.out[...] = 0
        mask = None if inputs["active"] is None else ops.upload(inputs["active"])
        ops.moe_experts(filled_act(ops, inputs["x"]), ops.upload(inputs["ids"]), table, mask, spec, scratch)
        out = ops.upload(inputs["before"].copy())
        ops.moe_combine(scratch, ops.upload(inputs["weights"]), out, True, 0.5)
        slots = ops.download(scratch.out[: n_tokens * spec.top_k])
        del pool
        return {"slots": slots, "out": ops.download(out)}

    def bytes_moved(inputs: Inputs) -> int:
        return len(np.unique(inputs["ids"])) * layout.useful_bytes + 2 * n_tokens * n_in * 4

    n_matrices = len(layout.projections)
    return Case(
        name=f"experts {name}",
        make_inputs=make_inputs,
        run=run,
        bytes_moved=bytes_moved,
        flops=lambda i: 2 * n_tokens * spec.top_k * n_matrices * n_in * spec.width,
        tolerance=0.01 if set(formats.values()) <= TOLERANCES.keys() else EXPERT_TOLERANCE,
        kind=kind,
    )


def summed_at_once(ops: Ops, inputs: Inputs, spec: MoeSpec) -> np.ndarray:
    """`out` of a case where only `moe_combine` reads what the experts give."""
    table, pool = expert_table(ops, inputs)
    n_tokens, n_in = inputs["x"].shape
    scratch = ops.moe_scratch(n_tokens, spec, n_in)
    scratch.only_summed = True
    ops.moe_experts(filled_act(ops, inputs["x"]), ops.upload(inputs["ids"]), table, None, spec, scratch)
    out = ops.upload(inputs["before"].copy())
    ops.moe_combine(scratch, ops.upload(inputs["weights"]), out, True, 0.5)
    del pool
    return ops.download(out)


def summed_case(
    name: str, formats: dict[str, str], spec: MoeSpec, n_in: int, n_tokens: int, page_bytes: int = PAGE_ALIGN,
    kind: Any = "edge",
) -> Case:  # fmt: skip
    """Both verbs as a step calls them: of few tokens the sum is made together with the down projection."""
    case = experts_case(name, formats, spec, n_in, n_tokens, page_bytes=page_bytes, kind=kind)
    return replace(case, name=f"summed {case.name}", run=lambda ops, i: {"out": summed_at_once(ops, i, spec)})


def route_case(name: str, spec: MoeSpec, n_tokens: int, *, bias: bool = False, logits: Any = None) -> Case:
    """Ids must be equal to the reference's, weights close."""

    def make_inputs(rng: np.random.Generator) -> Inputs:
        given = normal(rng, n_tokens, spec.n_experts, scale=2) if logits is None else np.asarray(logits, np.float32)
        return {"logits": given, "bias": normal(rng, spec.n_experts, scale=0.1) if bias else None}

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        n = inputs["logits"].shape[0]
        ids, weights = ops.empty((n, spec.top_k), np.int32), ops.empty((n, spec.top_k), np.float32)
        bias_array = None if inputs["bias"] is None else ops.upload(inputs["bias"])
        ops.route(ops.upload(inputs["logits"]), spec, bias_array, ids, weights)
        return {"ids": ops.download(ids), "weights": ops.download(weights)}

    return Case(
        name=f"route {name}",
        make_inputs=make_inputs,
        run=run,
        bytes_moved=lambda i: i["logits"].nbytes + 8 * i["logits"].shape[0] * spec.top_k,
        flops=lambda i: 4 * i["logits"].size,
        tolerance=2e-6,
    )


def combine_case(n_tokens: int, top_k: int, width: int, add: bool, kind: Any = "edge") -> Case:
    """moe_combine of outputs that are just there."""
    spec = MoeSpec(2 * top_k, top_k, 32)

    def make_inputs(rng: np.random.Generator) -> Inputs:
        return {
            "slots": normal(rng, n_tokens * top_k, width), "before": normal(rng, n_tokens, width),
            "weights": rng.uniform(0.1, 1, (n_tokens, top_k)).astype(np.float32),
        }  # fmt: skip

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        scratch = ops.moe_scratch(n_tokens, spec, width)
        scratch.out[...] = ops.upload(inputs["slots"])
        out = ops.upload(inputs["before"].copy())
        ops.moe_combine(scratch, ops.upload(inputs["weights"]), out, add, 0.5)
        return {"out": ops.download(out)}

    return Case(
        name=f"moe_combine T={n_tokens} {top_k} of width {width}{' added' if add else ''}",
        make_inputs=make_inputs,
        run=run,
        bytes_moved=lambda i: i["slots"].nbytes + (1 + add) * i["before"].nbytes,
        flops=lambda i: 2 * i["slots"].size,
        tolerance=1e-5,
        kind=kind,
    )


_TIES = np.tile(np.array([1, 3, 3, 0, 3, 1, 0, 3], np.float32), (2, 8))
_E01 = [[1.2, 0.7, 0.1, -0.3, -1, 0.9, 0, -2]]


def replay_case(n_tokens: int, n_layers: int, top_k: int) -> Case:
    """replay_routing of the layer before the last."""

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        ids = ops.upload(np.full((n_tokens, top_k), -1, np.int32))
        ops.replay_routing(ops.upload(inputs["recorded"]), n_layers - 2, ids)
        return {"ids": ops.download(ids)}

    return Case(
        name=f"route replayed T={n_tokens}",
        make_inputs=lambda rng: {"recorded": rng.integers(0, 512, (n_tokens, n_layers, top_k)).astype(np.int32)},
        run=run,
        bytes_moved=lambda inputs: n_tokens * top_k * 8,
        flops=lambda inputs: 0,
        tolerance=0.0,
    )


ROUTE_CASES = [
    replay_case(1, 2, 8),
    replay_case(97, 5, 3),
    route_case("softmax", MoeSpec(128, 8, 32), 9),
    route_case("softmax renormalised", MoeSpec(128, 8, 32, renormalise=True), 5),
    route_case("E01", MoeSpec(8, 2, 32), 1, logits=_E01),
    route_case("E01 renormalised", MoeSpec(8, 2, 32, renormalise=True), 1, logits=_E01),
    route_case("ties", MoeSpec(64, 6, 32), 2, logits=_TIES),
    route_case("60 experts", MoeSpec(60, 4, 32), 200),
    route_case(
        "512 experts, the last ones win", MoeSpec(512, 10, 32), 3, logits=np.tile(np.linspace(-2, 2, 512), (3, 1))
    ),
    route_case("1024 experts", MoeSpec(1024, 32, 32, renormalise=True), 3),
    route_case("one expert", MoeSpec(1, 1, 32, renormalise=True), 3),
    route_case("all experts", MoeSpec(40, 40, 32), 2),
    route_case("sigmoid", MoeSpec(64, 6, 32, "sigmoid", True, 2.5), 6, bias=True),
    route_case("sigmoid in groups", MoeSpec(256, 8, 32, "sigmoid", True, 2.5, 8, 4), 33, bias=True),
    route_case("softmax in groups", MoeSpec(160, 6, 32, "softmax", False, 16.0, 8, 3), 4),
    route_case("selected", MoeSpec(32, 4, 32, "softmax_selected"), 7),
    route_case("sqrt softplus", MoeSpec(96, 6, 32, "sqrt_softplus", True, 1.5), 7, bias=True),
    route_case("saturated sigmoid", MoeSpec(8, 3, 32, "sigmoid"), 1, logits=[[20, 25, 22, 30, 19, 28, 21, 27]]),
]

_Q4_K_M = {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}
_SMALL = MoeSpec(8, 2, 256, renormalise=True)


def _edge_cases() -> list[Case]:
    cases = [experts_case(f"q4_k_m T={n}", _Q4_K_M, _SMALL, 512, n) for n in (1, 2, 3, 8, 9, 20, 40, 300)]
    # More than 1024 assignments: the sort takes several blocks.
    cases.append(experts_case("q8_0 T=700", dict.fromkeys(_Q4_K_M, "q8_0"), MoeSpec(9, 2, 32), 64, 700))
    narrow = MoeSpec(12, 3, 96)
    for name in ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4"):
        for n in (1, 5, 60):
            cases.append(experts_case(f"{name} T={n}", dict.fromkeys(_Q4_K_M, name), narrow, 160, n))
    wide = MoeSpec(6, 2, 512)
    for name in ("q2_k", "q3_k", "q5_k", "iq4_xs", "iq1_m", "iq2_xxs", "iq2_s", "iq3_s", "tq1_0"):
        for n in (2, 50):
            cases.append(experts_case(f"{name} T={n}", dict.fromkeys(_Q4_K_M, name), wide, 256, n))
    mixed = {"gate": "q5_k", "up": "q6_k", "down": "q8_0"}
    for n in (1, 7, 64):
        cases.append(experts_case(f"three types T={n}", mixed, MoeSpec(5, 2, 288), 256, n, biases=True))
        four_bits = dict.fromkeys(_Q4_K_M, "nvfp4")
        cases.append(experts_case(f"factors T={n}", four_bits, MoeSpec(8, 2, 128), 192, n, factors=True))
        oai = MoeSpec(16, 4, 96, "softmax_selected", activation="swiglu_oai")
        cases.append(experts_case(f"biases T={n}", dict.fromkeys(_Q4_K_M, "mxfp4"), oai, 288, n, biases=True))
        both = f"factors and biases T={n}"
        cases.append(experts_case(both, four_bits, replace(oai, width=128), 320, n, biases=True, factors=True))
        relu = MoeSpec(8, 2, 64, activation="relu2", gated=False)
        cases.append(experts_case(f"no gate T={n}", {"up": "q5_0", "down": "q8_0"}, relu, 96, n))
        cases.append(experts_case(f"absent experts T={n}", _Q4_K_M, _SMALL, 256, n, active=True))
        cases.append(experts_case(f"repeated experts T={n}", _Q4_K_M, _SMALL, 256, n, repeated=True))
        # silu(g) u near 1e6 (known fault E07).
        cases.append(experts_case(f"large hidden values T={n}", _Q4_K_M, _SMALL, 512, n, x_scale=1000))
    return cases


EDGE_CASES = _edge_cases()

QWEN3_30B = MoeSpec(128, 8, 768, renormalise=True)
MODEL_CASES = [
    experts_case(f"qwen3-30b T={n}", _Q4_K_M, QWEN3_30B, 2048, n, page_bytes=432 * 1024, kind="model") for n in (1, 8)
]

SUMMED_CASES = [summed_case(f"q4_k_m T={n}", _Q4_K_M, _SMALL, 512, n) for n in (1, 4, 20)] + [
    summed_case("qwen3-30b T=1", _Q4_K_M, QWEN3_30B, 2048, 1, 432 * 1024, "model")
]

COMBINE_CASES = [combine_case(3, 2, 96, False), combine_case(20, 3, 288, True)]

CASES = ROUTE_CASES + EDGE_CASES + SUMMED_CASES + COMBINE_CASES + MODEL_CASES
