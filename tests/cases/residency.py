"""Cases of the residency step: who is chosen and in no place is brought from host memory; and of the host's commands.

The bytes that come cross the link, so these cases are held against its rate. A benchmark calls the timed ones over and
over: each leaves its layer such that the next call brings as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cases.common import Case, Inputs, Outputs, address_of
from cases.moe import expert_layout
from rimuru.memory.specs import ExpertLayerLayout
from rimuru.ops.base import Ops
from rimuru.ops.places import (
    ALL_COME,
    BY_RECENCY,
    COMMAND_FIELDS,
    DECAY,
    LOG_ENTRIES,
    MOST_BUFFERED,
    MOST_FILLS,
    N_CONTROLS,
    N_TOTALS,
    ExpertPlaces,
    LayerPlaces,
    n_copy_entries,
)

Verb = Literal["fetch_experts", "fetch_aside", "fetch_ahead"]
DECAY_TOKENS = 50.0
SLOT = 3
AT_HOME = 1 << 40
"""Added to where in the host's memory an expert is read, which tells it from where in the pool."""


@dataclass(frozen=True)
class FetchShape:
    """A layer whose places are held by n_held experts. A step of n_tokens chooses n_missed others and some of them."""

    layout: ExpertLayerLayout
    page_bytes: int
    n_places: int
    n_held: int
    n_tokens: int
    top_k: int
    n_missed: int
    n_buffers: int = 0
    most_fills: int = 64
    by_recency: bool = True
    n_padding: int = 0
    """Rows at position -1."""
    turns: bool = False
    """A second step chooses who held the places at first. Everybody comes, so everybody else has to go."""

    @property
    def comers(self) -> int:
        """Experts whose bytes are brought in each step."""
        return min(self.n_missed, self.most_fills, self.n_places) + min(
            self.n_buffers, max(0, self.n_missed - min(self.most_fills, self.n_places))
        )


def _ids(rng: np.random.Generator, shape: FetchShape, missed: np.ndarray, held: np.ndarray) -> np.ndarray:
    """int32 [T, k] in which all of `missed` are chosen and the rest is of `held`."""
    rows = []
    each = -(-len(missed) // (shape.n_tokens - shape.n_padding)) if len(missed) else 0
    for row in range(shape.n_tokens):
        mine = [missed[(row * each + i) % len(missed)] for i in range(each)]
        rows.append([*mine, *rng.permutation(held)[: shape.top_k - each]])
    return np.array(rows, np.int32)


def fetch_inputs(shape: FetchShape, rng: np.random.Generator) -> Inputs:
    layout, n = shape.layout, shape.layout.n_experts
    order = rng.permutation(n)
    held, absent = order[: shape.n_held], order[shape.n_held :]
    holders, place_of = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    holders[: shape.n_held], place_of[held] = held, np.arange(shape.n_held)
    missed = absent[: shape.n_missed]
    steps = [_ids(rng, shape, missed, held)]
    if shape.turns:
        steps.append(_ids(rng, shape, held, missed))
    # Only who comes needs bytes of its own at home; all others share the first slot.
    slots = np.zeros(n, np.int64)
    comers = np.concatenate([missed, held]) if shape.turns else missed
    slots[comers] = np.arange(1, 1 + len(comers))
    expert_bytes = layout.n_pages * shape.page_bytes
    n_pages = (shape.n_places + shape.n_buffers) * layout.n_pages
    positions = np.arange(shape.n_tokens, dtype=np.int32)
    positions[shape.n_tokens - shape.n_padding :] = -1
    return {
        "store": rng.integers(0, 256, (1 + len(comers)) * expert_bytes, np.uint8), "slots": slots,
        "pages": rng.permutation(n_pages).reshape(-1, layout.n_pages), "holders": holders, "place_of": place_of,
        "scores": rng.uniform(0, 3, n).astype(np.float32), "last_used": rng.permutation(n).astype(np.int32),
        "steps": steps, "positions": positions,
    }  # fmt: skip


def layer_arrays(ops: Ops, n_experts: int, n_pages: int) -> dict[str, Any]:
    """Arrays of a layer that start empty, by their names in LayerPlaces and ExpertPlaces."""
    zeros = {name: np.zeros(n_experts, np.int32) for name in ("counts", "buffered")}
    zeros |= {name: np.zeros(n_experts, np.bool_) for name in ("now", "later")}
    zeros |= {"copies": np.zeros(n_copy_entries(n_pages), np.int64), "log": np.zeros(1 + LOG_ENTRIES, np.int64)}
    zeros["totals"] = np.zeros(N_TOTALS, np.int32)
    return {name: ops.upload(values) for name, values in zeros.items()}


def make_places(ops: Ops, shape: FetchShape, i: Inputs, store: np.ndarray, pool: Any) -> LayerPlaces:
    """The layer as the device has it. store: its experts in host memory that the device reads; pool: pages, then those
    of loading buffers."""
    layout, page_bytes = shape.layout, shape.page_bytes
    in_layer = np.arange(layout.n_pages, dtype=np.int64) * page_bytes
    homes = store.ctypes.data + i["slots"] * layout.n_pages * page_bytes
    sets = address_of(pool) + i["pages"].astype(np.int64) * page_bytes
    pages = np.zeros((layout.n_experts, layout.n_pages), np.int64)
    pages[: shape.n_places] = sets[: shape.n_places]
    addresses = homes[:, None] + in_layer
    is_held = i["place_of"] >= 0
    addresses[is_held] = pages[i["place_of"][is_held]]
    buffers = sets[shape.n_places :] if shape.n_buffers else np.zeros((1, layout.n_pages), np.int64)
    control = np.zeros(N_CONTROLS, np.int32)
    control[BY_RECENCY] = control[ALL_COME] = shape.by_recency
    control[MOST_FILLS], control[MOST_BUFFERED] = shape.most_fills, shape.n_buffers
    control[DECAY] = np.float32(DECAY_TOKENS).view(np.int32)
    given = {"addresses": addresses, "homes": homes, "pages": pages, "buffers": buffers, "control": control}
    given |= {name: i[name] for name in ("holders", "place_of", "last_used", "scores")}
    return LayerPlaces(
        layout=layout, page_bytes=page_bytes, slot=SLOT, **{name: ops.upload(values) for name, values in given.items()},
        **layer_arrays(ops, layout.n_experts, layout.n_pages),
    )  # fmt: skip


def read_at(table: np.ndarray, pool: Any, store: np.ndarray) -> np.ndarray:
    """Where each page is read, whatever the addresses are: bytes into the pool, or into the host's memory."""
    at_home = table - store.ctypes.data
    return np.where((at_home >= 0) & (at_home < store.nbytes), at_home + AT_HOME, table - address_of(pool))


def fetch_case(name: str, shape: FetchShape, verb: Verb = "fetch_experts", kind: Any = "edge") -> Case:
    layout = shape.layout
    n_steps = 2 if shape.turns else 1

    def run(ops: Ops, i: Inputs) -> Outputs:
        copier = ops.copier()  # its memory lives as long as it does
        store = copier.alloc_host(i["store"].nbytes)
        store[:] = i["store"]
        pool = ops.upload(np.full(max(1, i["pages"].size) * shape.page_bytes, 0xFF, np.uint8))
        places = make_places(ops, shape, i, store, pool)
        all_ids = [ops.upload(ids) for ids in i["steps"]]
        positions = ops.upload(i["positions"])
        for ids in all_ids:
            getattr(ops, verb)(ids, positions, places)
            if verb != "fetch_experts":
                ops.join_fetch()
        names = ["holders", "place_of", "last_used", "scores", "counts", "buffered", "log"]
        names += ["now", "later"] if verb == "fetch_aside" else []
        found = {name: ops.download(getattr(places, name)) for name in names}
        found |= {f"ids{n}": ops.download(ids) for n, ids in enumerate(all_ids)}
        found |= {"totals": ops.download(places.totals)[: N_TOTALS - 1], "pool": ops.download(pool)}
        found["addresses"] = read_at(ops.download(places.addresses), pool, store)
        del copier
        return found

    # A plan reads and writes a few words of every expert, and the table of places.
    plan_bytes = layout.n_experts * (9 * 4 + 8) + 8 * shape.n_tokens * shape.top_k
    return Case(
        f"{verb} {name}", lambda rng: fetch_inputs(shape, rng), run,
        lambda _: n_steps * shape.comers * layout.useful_bytes or plan_bytes, lambda _: 0, 1e-5, kind,
        bytes_over="link" if shape.comers else "memory",
    )  # fmt: skip


def commands_case(name: str, n_layers: int, n_experts: int, n_pages: int, n_commands: int, kind: Any = "edge") -> Case:
    """set_places: places that move, come and go, held and empty ones. Nothing is read at the addresses."""
    n = n_layers * n_experts

    def make_inputs(rng: np.random.Generator) -> Inputs:
        held = rng.permuted(np.tile(np.arange(n_experts), (n_layers, 1)), axis=1).astype(np.int32)
        held[:, n_experts // 2 :] = -1  # the places above are empty, and the last ones are none
        place_of = np.full((n_layers, n_experts), -1, np.int32)
        for layer, row in enumerate(held):
            place_of[layer, row[row >= 0]] = np.flatnonzero(row >= 0)
        pages = rng.integers(1, 1 << 40, (n, n_pages)) * 16
        pages.reshape(n_layers, n_experts, n_pages)[:, 3 * n_experts // 4 :] = 0
        commands = np.zeros((n_commands, COMMAND_FIELDS + n_pages), np.int64)
        for row, at in enumerate(rng.permutation(n)[:n_commands]):
            first = at // n_experts * n_experts
            commands[row, :COMMAND_FIELDS] = first, first * n_pages, n_pages, at - first
            if row % 3:
                commands[row, COMMAND_FIELDS:] = rng.integers(1, 1 << 40, n_pages) * 16
        return {
            "commands": commands, "holders": held.reshape(-1), "place_of": place_of.reshape(-1), "pages": pages,
            "homes": rng.integers(1, 1 << 40, n) * 4096, "addresses": rng.integers(1, 1 << 40, (n, n_pages)) * 16,
        }  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        names = ("addresses", "homes", "pages", "holders", "place_of")
        given = {name: ops.upload(i[name].reshape(-1)) for name in names}
        given |= dict.fromkeys(("last_used", "scores", "control", "buffers"))  # of the layers' own turns
        places = ExpertPlaces(page_bytes=4096, **given, **layer_arrays(ops, n, n_pages))
        ops.set_places(ops.upload(i["commands"]), n_commands, places)
        return {name: ops.download(given[name]) for name in names}

    return Case(
        f"set_places {name}", make_inputs, run, lambda i: 3 * i["commands"].nbytes, lambda _: 0, 0.0, kind
    )  # fmt: skip


_TINY = ExpertLayerLayout(0, 40, 3, ())
_PAGE = 4096 + 16
"""Pages whose last piece is not a whole one."""

EDGE_CASES = [
    fetch_case("nobody missed", FetchShape(_TINY, _PAGE, 20, 16, 3, 4, 0, n_buffers=4)),
    fetch_case("empty places", FetchShape(_TINY, _PAGE, 20, 10, 2, 4, 6)),
    fetch_case("the longest unused leave, padding", FetchShape(_TINY, _PAGE, 12, 12, 7, 4, 5, n_padding=3)),
    fetch_case("the coldest leave", FetchShape(_TINY, _PAGE, 12, 10, 4, 4, 8, by_recency=False)),
    fetch_case("more missed than may come", FetchShape(_TINY, _PAGE, 12, 12, 6, 3, 9, most_fills=2, n_buffers=5)),
    fetch_case("no places", FetchShape(_TINY, _PAGE, 0, 0, 5, 3, 15, n_buffers=7, most_fills=0)),
    fetch_case("two steps in turn", FetchShape(_TINY, _PAGE, 4, 4, 1, 4, 4, turns=True)),
    *[
        fetch_case("places and buffers", FetchShape(_TINY, _PAGE, 12, 12, 8, 3, 12, most_fills=6, n_buffers=9), verb)
        for verb in ("fetch_aside", "fetch_ahead")
    ],
    fetch_case("nobody missed", FetchShape(_TINY, _PAGE, 20, 16, 3, 4, 0), "fetch_aside"),
    commands_case("of two layers", 2, 24, 3, 20),
]

_QWEN3_30B = expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 128, 2048, 768, 432 * 1024)
_BYTES = 432 * 1024
MODEL_FETCHES: dict[str, tuple[FetchShape, Verb]] = {
    "qwen3-30b T=1, nobody missed": (FetchShape(_QWEN3_30B, 64, 128, 128, 1, 8, 0), "fetch_experts"),
    "qwen3-30b T=32, nobody missed": (FetchShape(_QWEN3_30B, 64, 128, 128, 32, 8, 0), "fetch_experts"),
    "qwen3-30b T=1, 4 into places, in turn": (
        FetchShape(_QWEN3_30B, _BYTES, 4, 4, 1, 4, 4, turns=True), "fetch_experts"
    ),
    "qwen3-30b T=1, 2 into buffers": (
        FetchShape(_QWEN3_30B, _BYTES, 8, 8, 1, 8, 2, n_buffers=2, most_fills=0), "fetch_experts"
    ),
    "qwen3-30b T=32, 32 into buffers": (
        FetchShape(_QWEN3_30B, _BYTES, 8, 8, 32, 8, 32, n_buffers=32, most_fills=0), "fetch_experts"
    ),
    "qwen3-30b T=32, nobody missed, aside": (FetchShape(_QWEN3_30B, 64, 128, 128, 32, 8, 0), "fetch_aside"),
    "qwen3-30b T=32, 32 into buffers, aside": (
        FetchShape(_QWEN3_30B, _BYTES, 8, 8, 32, 8, 32, n_buffers=32, most_fills=0), "fetch_aside"
    ),
}  # fmt: skip
"""By what comes after the verb in their names."""

MODEL_CASES = [
    *[fetch_case(name, shape, verb, "model") for name, (shape, verb) in MODEL_FETCHES.items()],
    commands_case("qwen3-30b, 64 of 6144", 48, 128, 7, 64, "model"),
]

CASES = EDGE_CASES + MODEL_CASES
