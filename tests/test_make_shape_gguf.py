"""tools/make_shape_gguf.py: files of published shapes that the engine opens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import make_shape_gguf

from rimuru.arch.registry import read_config
from rimuru.arch.shape_data import SHAPES
from rimuru.arch.tensors import check_tensors
from rimuru.formats.gguf import open_gguf


@pytest.mark.parametrize("name, quant", [("gpt-oss-20b", "mxfp4_moe"), ("deepseek-v2-lite", "q4_k_m")])
def test_a_cut_down_file_is_complete(name: str, quant: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    small = {
        "block_count": 2, "embedding_length": 256, "expert_count": 4, "expert_used_count": 2,
        "expert_feed_forward_length": 256, "feed_forward_length": 256,
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    make_shape_gguf.write_shape(path, replace(shape, keys=shape.keys | small, n_vocab=1000), quant, name, 0.35)
    with open_gguf(path) as gguf:
        check_tensors(read_config(gguf), gguf)
        assert gguf.kv[f"{shape.architecture}.vocab_size"] == 1000  # other engines ask for it
        experts = gguf.tensors["blk.1.ffn_up_exps.weight"]
        assert experts.format.name == ("mxfp4" if quant == "mxfp4_moe" else "q4_k")
        router = gguf.raw("blk.1.ffn_gate_inp.weight").view(np.float32)
        assert np.isfinite(router).all() and router.std() > 0
        assert len(np.unique(gguf.raw(experts.name))) > 100
