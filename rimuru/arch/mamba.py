"""Mamba layers from the ssm.* keys (facts sections 4.4 and 4.6)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import Mamba1Spec, Mamba2Spec


def mamba2(base: Base) -> Mamba2Spec:
    """Heads divide the inner size; groups of heads share B and C."""
    inner, n_heads = base.count("ssm.inner_size", None, 1), base.count("ssm.time_step_rank", None, 1)
    n_groups = base.count("ssm.group_count", None, 1)
    base.check(inner % n_heads == 0, f"ssm.inner_size {inner} is no multiple of {n_heads} heads (ssm.time_step_rank)")
    base.check(
        n_heads % n_groups == 0, f"{n_heads} heads (ssm.time_step_rank) do not fall into {n_groups} equal groups"
    )
    return Mamba2Spec(
        inner_size=inner,
        state_size=base.count("ssm.state_size", None, 1),
        n_heads=n_heads,
        n_groups=n_groups,
        conv_kernel=base.count("ssm.conv_kernel", None, 2),
    )


def mamba1(base: Base) -> Mamba1Spec:
    return Mamba1Spec(
        inner_size=base.count("ssm.inner_size", None, 1),
        state_size=base.count("ssm.state_size", None, 1),
        dt_rank=base.count("ssm.time_step_rank", None, 1),
        conv_kernel=base.count("ssm.conv_kernel", None, 2),
    )
