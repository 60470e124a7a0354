"""What SequenceCache knows of one open sequence, and what it tells of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from rimuru.memory.kv_cache import KvSequence
from rimuru.memory.state_cache import Snapshot
from rimuru.memory.swap import SavedSequence


@dataclass(frozen=True, slots=True)
class CacheHit:
    """How much of a prompt is in the cache already."""

    n_cached_tokens: int


@dataclass(slots=True)
class OpenSequence:
    """Its KV tables, its marks, and what its first `extend` will bring."""

    kv: KvSequence | None
    n_tokens: int = 0
    """Tokens whose KV and states are in the cache."""
    n_pending: int = 0
    """Tokens that a step may have written beyond those, not committed yet."""
    has_states: bool = False
    """Its states have their pages (or there are no states)."""
    restore: Snapshot | None = None
    """States to start from, copied at the first extend."""
    first: Snapshot | None = None
    """The shortest snapshot on its way that was found or kept: what it began with."""
    saved: SavedSequence | None = None
    """What it had written before it gave way, copied at the first extend."""
    saved_ids: list[int] = field(default_factory=list)
    """Its token ids from where the prefix index ends."""
