"""Recurrent kernels on the host: a prompt's results do not depend on how it was cut, or on what ran beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
import test_emulated_families as families
from cases.pieces import CUTS, VERBS, Recurrent, run_in_pieces

pytestmark = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler")

ops = families.ops


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_pieces_and_batches_change_no_bit(verb: Recurrent, ops: Any) -> None:
    found = {name: run_in_pieces(verb, ops, pieces) for name, pieces in CUTS.items()}
    expected = found["token by token"]
    assert np.isfinite(expected["out"]).all()
    for name, result in found.items():
        assert np.array_equal(result["out"], expected["out"]), name
        assert np.array_equal(result["pool"], expected["pool"]), name
