"""A file whose weights hold no finite numbers: the requests that meet them end with the reason, and no other."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import RimuruError
from rimuru.cli import main
from rimuru.formats.gguf import open_gguf
from tools.make_random_gguf import write_random_model

DAMAGED_TOKEN, GREEDY = 11, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
HEALTHY = [[1, 7, 30], [99, 3]]


def damage(path: Path, name: str, row: int, value: float) -> None:
    """Overwrite one number of an f32 tensor's row."""
    with open_gguf(path) as gguf:
        info = gguf.tensors[name]
        assert info.format.name == "f32"
        place = info.offset_bytes + 4 * (row * info.n_in + 3)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(np.float32(value).tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_only_requests_that_meet_the_damage_end(arch: str, value: float, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "random.gguf", arch=arch, quant="f32", seed=4, context_length=128)
    with LLM(path, device="cpu") as llm:
        expected = [answer.token_ids for answer in llm.generate(HEALTHY, GREEDY)]
        assert DAMAGED_TOKEN not in {token for answer in expected for token in answer}
    damage(path, "token_embd.weight", DAMAGED_TOKEN, value)
    with LLM(path, device="cpu") as llm:
        engine = llm.loaded.engine
        sequences = [engine.add(prompt, GREEDY) for prompt in (HEALTHY[0], [1, DAMAGED_TOKEN, 30], HEALTHY[1])]
        engine.run_until(sequences)
        assert [s.output_ids for s in sequences] == [expected[0], [], expected[1]]
        assert [s.error is None for s in sequences] == [True, False, True]
        engine.audit()
        with pytest.raises(RimuruError, match="no longer finite"):  # nothing of it was kept as a prefix
            llm.generate([1, DAMAGED_TOKEN, 30], SamplingParams(max_tokens=2, temperature=1.0, seed=1, logprobs=2))
        assert llm.generate(HEALTHY[0], GREEDY)[0].token_ids == expected[0]


def test_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_random_model(tmp_path / "random.gguf", arch="qwen3moe", quant="f32", seed=4, context_length=128)
    damage(path, "blk.1.attn_norm.weight", 0, np.nan)
    with caplog.at_level(logging.CRITICAL):
        assert main(["run", str(path), "-p", "Once upon", "-n", "4", "--device", "cpu", "-q"]) != 0
    printed = capsys.readouterr()
    assert "no longer finite" in printed.err and "Traceback" not in printed.err
