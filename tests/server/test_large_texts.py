"""Large texts to /tokenize and /detokenize: bounded, and what they took is given back."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from server_fixtures import Running

from rimuru.base import heap

MOST = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("field", ["content", "text", "prompt", "input"])
def test_texts_far_beyond_the_context_are_refused_early(script: Running, field: str) -> None:
    started = time.monotonic()
    refused = script.post("/tokenize", {field: "ab 12 " * 4_000_000})
    assert time.monotonic() - started < 3
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "content")
    assert error["message"] == f"the text has 24000000 bytes, the limit is {MOST}; send it in parts"
    assert script.post("/tokenize", {field: "é" * (MOST // 2 + 1)}).status_code == 400


def test_ids_have_a_limit_too(script: Running) -> None:
    refused = script.post("/detokenize", {"tokens": [1] * (MOST + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert script.post("/detokenize", {"tokens": [1] * 1000}).status_code == 200


@pytest.mark.skipif(sys.platform != "linux" or heap._TRIM is None, reason="the C library has no malloc_trim")
def test_memory_of_large_texts_is_given_back(script: Running) -> None:
    text = "ab 12 " * (MOST // 6)
    assert script.post("/tokenize", {"content": "ab"}).status_code == 200
    heap.give_back_freed()
    before = resident_bytes()
    for _ in range(3):
        assert script.post("/tokenize", {"content": text}).status_code == 200
    assert resident_bytes() - before < 100 << 20  # 26 MB; 222 MB where nothing is given back
