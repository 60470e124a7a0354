"""Latent attention's verbs on a GPU, and whole models of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.common import Case
from cases.mla import HEAD_LINEAR_CASES, LATENT_ROW_CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def ops(request: pytest.FixtureRequest) -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps(deterministic=request.param)


@pytest.mark.parametrize("case", [*HEAD_LINEAR_CASES, *LATENT_ROW_CASES], ids=lambda case: case.name)
def test_matches_the_reference(ops: Any, case: Case) -> None:
    case.check(ops)


def test_a_model_gives_the_cpus_logits(tmp_path: Path) -> None:
    from rimuru import LLM
    from tools.make_random_gguf import write_random_model

    keys = {"expert_count": 4, "expert_used_count": 4, "expert_group_count": None}
    path = write_random_model(tmp_path / "m.gguf", "deepseek2", "f16", tokenizer=False, **keys)
    tokens = np.random.default_rng(2).integers(0, 160, 60).tolist()
    found = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, memory="1GiB", context=128, kv_type="f32", deterministic=True) as llm:
            found.append(llm.logits(tokens, chunk=60))
            if device == "cuda":
                assert np.array_equal(llm.logits(tokens, chunk=7), found[1])
    error = ((found[1] - found[0]) ** 2).sum() / (found[0] ** 2).sum()
    assert error <= 1e-5, error
