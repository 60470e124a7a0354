"""EngineConfig: what the user asked for, validated; every "auto" is still unresolved (engine/resolve.py does that)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rimuru.base.errors import BadInputError
from rimuru.base.units import parse_bytes

DeviceName = Literal["auto", "cpu", "cuda"]
KvType = Literal["auto", "f16", "bf16", "f32"]
PolicyName = Literal["auto", "static", "fixed", "paper", "cost"]
ResidencyName = Literal["auto", "hotset", "recency"]

MAX_SEQUENCES = 4096


@dataclass(frozen=True)
class EngineConfig:
    """User intent. Sizes are bytes or strings such as `8GiB`; None = decide for me.

    `resident_experts`: a whole number of experts, or a fraction in [0, 1] of all of them; fixes the expert cache.
    `swap`: host memory for requests that give way to others; on the CPU none unless given (it comes on top of memory).
    `prediction`: missed experts of the next layer come early, as its router foretells them from this layer's input.
    `cpu_experts`: missed experts may be computed on the CPU, a share that is found by timing steps (CUDA).
    `max_step_tokens`: token budget of a step; `max_sequences`: how many requests run at once at most.
    """

    device: DeviceName = "auto"
    memory: int | str | None = None
    ram: int | str | None = None
    swap: int | str | None = None
    threads: int | None = None
    context: int | None = None
    kv_type: KvType = "auto"
    policy: PolicyName = "auto"
    residency: ResidencyName = "auto"
    resident_experts: int | float | str | None = None
    expert_offload_limit: int | None = None
    deterministic: bool = False
    seed: int = 0
    max_step_tokens: int | None = None
    max_sequences: int | None = None
    prefix_cache: bool = True
    prefetch: bool = True
    prediction: bool = False
    fill_on_read: bool = True
    in_place: bool = True
    cpu_experts: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("device", DeviceName),
            ("kv_type", KvType),
            ("policy", PolicyName),
            ("residency", ResidencyName),
        ):
            if getattr(self, name) not in get_args(choices):
                raise BadInputError(
                    f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}"
                )
        for name in ("memory", "ram", "swap"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        for name in ("threads", "context", "max_step_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BadInputError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.max_sequences is not None and self.max_sequences > MAX_SEQUENCES:
            raise BadInputError(f"max_sequences must be at most {MAX_SEQUENCES}, got {self.max_sequences}")
        if self.resident_experts is not None:
            object.__setattr__(self, "resident_experts", parse_share(self.resident_experts))
            if self.policy == "static" and repr(self.resident_experts) != "1.0":  # 1 is one expert
                raise BadInputError("policy static keeps all experts; for a number or share of them use policy fixed")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise BadInputError(f"seed must be a whole number, got {self.seed!r}")
        limit = self.expert_offload_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise BadInputError(f"expert_offload_limit must be a whole number of at least 0, got {limit!r}")


def parse_share(value: int | float | str) -> int | float:
    """A number of experts (whole number) or a share of them (written with a point: `0.5`, `1.0`)."""
    if isinstance(value, str):
        try:
            value = float(value) if any(c in value for c in ".eE") else int(value)
        except ValueError:
            raise BadInputError(f"resident experts must be a number or a share such as 0.5; got {value!r}") from None
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not value >= 0
        or (isinstance(value, float) and value > 1)
    ):
        raise BadInputError(
            f"resident experts must be a number of at least 0 or a share from 0.0 to 1.0; got {value!r}"
        )
    return value
