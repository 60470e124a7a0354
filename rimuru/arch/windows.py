"""Which layers see a sliding window only (facts section 3.4)."""

from __future__ import annotations

from rimuru.arch.common import Base, read_int


def windowed_layers(base: Base, default_period: int) -> tuple[bool, ...]:
    """Flags per trunk layer: the key's own flags, or all but the last layer of every period."""
    key = base.key("attention.sliding_window_pattern")
    if key in base.gguf.kv and base.gguf.kv.type_name(key).startswith("arr"):
        flags = base.gguf.kv.require_list(key, bool)
        base.check(len(flags) == base.n_blocks, f"key {key} has {len(flags)} entries for {base.n_blocks} blocks")
        return tuple(bool(flag) for flag in flags[: base.n_layers])
    period = read_int(base.gguf, key, default_period, 0)
    return tuple(period > 0 and index % period < period - 1 for index in range(base.n_layers))
