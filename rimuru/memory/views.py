"""Views: a tensor kind's window on the pool. The only code that turns page ids into addresses and tables.

A view's table is one flat host array. On the CPU the kernels read it as it is; on a device the view publishes the
entries that changed since the last step to a mirror at a fixed address, in one call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ConvLayout, ExpertLayerLayout, KvLayout, PageKind, SsmLayout

Upload = Callable[[np.ndarray, np.ndarray], None]
"""upload(indices int64 [n], values [n]): write values to those entries of the device's flat mirror."""


class Table:
    """A flat host array that remembers which entries changed since they were last published."""

    def __init__(self, n: int, dtype: type, fill: int) -> None:
        self.values: np.ndarray = np.full(n, fill, dtype)
        self._changed = np.zeros(n, np.bool_)

    def set(self, index: np.ndarray | slice, values: np.ndarray | int) -> None:
        """Write entries and mark them as changed."""
        self.values[index] = values
        self._changed[index] = True

    def publish(self, upload: Upload | None) -> int:
        """Send changed entries to the mirror, if there is one; how many they were."""
        indices = np.flatnonzero(self._changed)
        if indices.size:
            if upload is not None:
                upload(indices, self.values[indices])
            self._changed[indices] = False
        return int(indices.size)


class ExpertView:
    """Where each page of each expert is read from now.

    Experts of all layers are numbered through: expert `row` = rows_before[layer slot] + expert. This number is also
    the owner tag of their pool pages. Entries of layer slot s, [n_experts, n_pages], lie one after the other:

        | slot 0: e0 p0 p1 .. | e1 p0 p1 .. | ... | slot 1: ...
    """

    def __init__(self, pool: PagePool) -> None:
        layout = pool.layout.expert
        assert layout is not None
        self.pool = pool
        self.layers: tuple[ExpertLayerLayout, ...] = layout.layers
        n_experts = np.array([layer.n_experts for layer in self.layers], np.int64)
        n_pages = np.array([layer.n_pages for layer in self.layers], np.int64)
        self.rows_before = np.concatenate([[0], np.cumsum(n_experts)])
        self.entries_before = np.concatenate([[0], np.cumsum(n_experts * n_pages)])
        self.table = Table(int(self.entries_before[-1]), np.int64, 0)
        self.page_ids = np.full(int(self.entries_before[-1]), -1, np.int32)
        """Pool page of each entry, -1 = not in the pool; same order as the table."""

    @property
    def n_experts(self) -> int:
        return int(self.rows_before[-1])

    def row(self, slot: int, expert: int) -> int:
        """Number of an expert over all layers: the owner tag of its pages."""
        return int(self.rows_before[slot]) + expert

    def slot_of(self, row: int) -> tuple[int, int]:
        """(layer slot, expert) of an expert's number."""
        slot = int(np.searchsorted(self.rows_before, row, side="right")) - 1
        return slot, row - int(self.rows_before[slot])

    def layer(self, slot: int) -> np.ndarray:
        """Addresses int64 [n_experts, n_pages] of a layer slot: a window on the host table."""
        layer = self.layers[slot]
        return self.table.values[self._layer_span(slot)].reshape(layer.n_experts, layer.n_pages)

    def layer_pages(self, slot: int) -> np.ndarray:
        """Pool page ids int32 [n_experts, n_pages] of a layer slot, -1 = not in the pool."""
        layer = self.layers[slot]
        return self.page_ids[self._layer_span(slot)].reshape(layer.n_experts, layer.n_pages)

    def _layer_span(self, slot: int) -> slice:
        return slice(int(self.entries_before[slot]), int(self.entries_before[slot + 1]))

    def _span(self, slot: int, expert: int) -> slice:
        n_pages = self.layers[slot].n_pages
        start = int(self.entries_before[slot]) + expert * n_pages
        return slice(start, start + n_pages)

    def pages(self, slot: int, expert: int) -> np.ndarray | None:
        """Pool pages int32 [n_pages] of a resident expert, else None."""
        ids = self.page_ids[self._span(slot, expert)]
        return ids.copy() if ids[0] >= 0 else None

    def is_resident(self, slot: int) -> np.ndarray:
        """bool [n_experts]: which experts of a layer slot are in the pool."""
        return self.layer_pages(slot)[:, 0] >= 0

    def place(self, slot: int, expert: int, ids: np.ndarray) -> None:
        """From now on the expert is read from these pool pages int32 [n_pages]."""
        span = self._span(slot, expert)
        self.page_ids[span] = ids
        self.table.set(span, self.pool.addresses("expert", ids))

    def place_elsewhere(self, slot: int, expert: int, addresses: np.ndarray | int) -> np.ndarray | None:
        """The expert is read outside of the pool's pages: a loading buffer or host memory; 0 = it cannot be read.

        Gives the pool pages that it had; the caller frees them when nothing reads them any more.
        """
        ids = self.pages(slot, expert)
        span = self._span(slot, expert)
        self.page_ids[span] = -1
        self.table.set(span, addresses)
        return ids

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages: entries at a source now name its target."""
        entries, ids = moved_entries(self.page_ids, sources, targets)
        self.page_ids[entries] = ids
        self.table.set(entries, self.pool.addresses("expert", ids))

    def publish(self, upload: Upload | None = None) -> int:
        """Send changed addresses to the device mirror; once per step."""
        return self.table.publish(upload)

    def audit(self) -> None:
        """Every entry's page is allocated, owned by its expert, and in the table at its address."""
        resident = np.flatnonzero(self.page_ids >= 0)
        ids = self.page_ids[resident]
        if np.unique(ids).size != ids.size:
            raise AuditError(f"{ids.size - np.unique(ids).size} expert pages are named by more than one table entry")
        if (self.table.values[resident] != self.pool.addresses("expert", ids)).any():
            raise AuditError("an expert's address in the table is not that of its pool page")
        slot_of_entry = np.searchsorted(self.entries_before, resident, side="right") - 1
        n_pages = np.array([layer.n_pages for layer in self.layers])[slot_of_entry]
        rows = self.rows_before[slot_of_entry] + (resident - self.entries_before[slot_of_entry]) // n_pages
        wrong = self.pool.allocator.owners("expert", ids) != rows
        if wrong.any():
            raise AuditError(f"{int(wrong.sum())} expert pages belong to another expert than the table says")


class SequenceView:
    """Page ids of one kind for every open sequence: int32 [n_slots, width], -1 = none. Grows by doubling.

    A slot is a sequence's row. The meaning of the columns is the subclass's.
    """

    kind: PageKind

    def __init__(self, pool: PagePool, width: int, n_slots: int = 8) -> None:
        self.pool = pool
        self.ids = np.full((n_slots, width), -1, np.int32)

    def reserve(self, n_slots: int, width: int) -> None:
        """Make room for slots and columns."""
        rows, columns = self.ids.shape
        if n_slots > rows or width > columns:
            rows = rows if n_slots <= rows else max(n_slots, 2 * rows)
            columns = columns if width <= columns else max(width, 2 * columns)
            grown = np.full((rows, columns), -1, np.int32)
            grown[: self.ids.shape[0], : self.ids.shape[1]] = self.ids
            self.ids = grown

    def clear(self, slot: int) -> None:
        """Forget a slot's pages."""
        self.ids[slot] = -1

    def addresses(self, slot: int) -> np.ndarray:
        """Addresses int64 [width] of a slot's pages, 0 = none."""
        return self.pool.addresses(self.kind, self.ids[slot])

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages: entries at a source now name its target, in every slot."""
        flat = self.ids.reshape(-1)
        entries, ids = moved_entries(flat, sources, targets)
        flat[entries] = ids


class KVView:
    """KV pages of the open sequences: one SequenceView per group of attention layers; column = block of the group."""

    def __init__(self, pool: PagePool, layout: KvLayout) -> None:
        self.layout = layout
        self.groups = [KVGroupView(pool, 16) for _ in layout.groups]

    def write_rows(self, slots: np.ndarray, out: np.ndarray) -> None:
        """Batch.kv_pages: out int32 [G, S, B] for the sequences in `slots` [S]; B holds their blocks (or more)."""
        for group, rows in zip(self.groups, out, strict=True):
            width = min(rows.shape[1], group.ids.shape[1])
            rows[:, :width] = group.ids[slots, :width]
            rows[:, width:] = -1


class KVGroupView(SequenceView):
    """Column j is the page of tokens j * page_tokens .. (j + 1) * page_tokens."""

    kind: PageKind = "kv"


class SSMView(SequenceView):
    """Column i is the state page of recurrent layer slot i."""

    kind: PageKind = "ssm"

    def __init__(self, pool: PagePool, layout: SsmLayout) -> None:
        super().__init__(pool, len(layout.layers))


class ConvView(SequenceView):
    """Column i is the first of the n_rows consecutive pages of convolution layer slot i."""

    kind: PageKind = "conv"

    def __init__(self, pool: PagePool, layout: ConvLayout) -> None:
        super().__init__(pool, len(layout.layers))


def moved_entries(ids: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(entries of ids that name a source, their targets)."""
    order = np.argsort(sources)
    entries = np.flatnonzero(np.isin(ids, sources))
    return entries, targets[order][np.searchsorted(sources[order], ids[entries])]
