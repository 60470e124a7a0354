"""What files of hybrids hold besides the trunk: multi-token-prediction blocks are recognised and left unused."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM
from rimuru.formats.gguf import open_gguf
from rimuru.inspect import inspect_model
from tools.make_random_gguf import write_random_model

TOKENS = list(range(3, 40))
LINE = "1 multi-token-prediction block(s)"


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
def test_prediction_blocks_change_nothing_but_a_log_line(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write_random_model(tmp_path / "plain.gguf", arch, "q8_0", tokenizer=False)
    more = write_random_model(
        tmp_path / "more.gguf", arch, "q8_0", tokenizer=False, block_count=5, nextn_predict_layers=1
    )
    logits = []
    for path, n_lines in ((plain, 0), (more, 1)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "rimuru"), LLM(path, device="cpu", threads=2) as llm:
            assert sum(LINE in record.getMessage() for record in caplog.records) == n_lines
            assert len(llm.loaded.config.layers) == 4 and llm.loaded.config.n_mtp_blocks == n_lines
            logits.append(llm.logits(TOKENS))
    assert np.array_equal(logits[0], logits[1])


def test_a_file_with_its_blocks_tensors(logit_models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tensors of the further block are in this file: no byte of them is loaded."""
    (path,) = logit_models.glob("qwen35moe-mtp.gguf")
    with open_gguf(path) as gguf:
        report = inspect_model(gguf, 4, None)
    assert any(LINE in note for note in report["notes"])
    with caplog.at_level(logging.INFO, "rimuru"), LLM(path, device="cpu", threads=2) as llm:
        assert any(LINE in record.getMessage() for record in caplog.records)
        loaded = llm.loaded
        unused = [name for name in loaded.gguf.tensors if name.startswith(f"blk.{len(loaded.config.layers)}.")]
        assert any(".nextn." in name for name in unused)
        dense = sum(t.n_bytes for n, t in loaded.gguf.tensors.items() if n not in unused and "_exps." not in n)
        assert 0 < loaded.dense_bytes <= 1.3 * dense
