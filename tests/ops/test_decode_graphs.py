"""Decode graphs: eager, captured, replayed, all on one stream, which stays current; on fake streams and a GPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from rimuru.batch import Batch
from rimuru.ops.cuda.graphs import DecodeGraphs


class Streams:
    """Current streams as CuPy keeps them: the end of a `with` brings back the stream of the `with` around it, or the
    null stream, and forgets what `use` had chosen."""

    def __init__(self) -> None:
        self.null = FakeStream(self)
        self.current, self.entered = self.null, [self.null]


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def upload(self, stream: FakeStream) -> None:
        self.log.append("upload")

    def launch(self, stream: FakeStream) -> None:
        self.log.append("launch")


class FakeStream:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.log, self.is_capturing = streams, list[str](), False

    def use(self) -> FakeStream:
        self.streams.current = self
        return self

    def __enter__(self) -> FakeStream:
        self.streams.entered.append(self)
        return self.use()

    def __exit__(self, *_: object) -> None:
        self.streams.entered.pop()
        self.streams.current = self.streams.entered[-1]

    def begin_capture(self, mode: object) -> None:
        self.is_capturing = True

    def end_capture(self) -> FakeGraph:
        self.is_capturing = False
        return FakeGraph(self.log)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    module = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(streamCaptureModeThreadLocal=1)
    module.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    return Streams()


def one_token() -> Batch:
    zero = np.zeros(1, np.int32)
    return Batch(
        token_ids=zero, positions=zero, seq_of_token=zero, query_start=np.arange(2, dtype=np.int32),
        context_len=zero + 1,
        kv_pages=np.zeros((1, 1, 1), np.int32), ssm_pages=np.zeros((1, 0), np.int32),
        conv_pages=np.zeros((1, 0), np.int32), fresh_state=np.zeros(1, np.bool_), logit_rows=zero,
    )  # fmt: skip


def stage(batch: Batch) -> Any:
    return types.SimpleNamespace(host=batch, token_ids=types.SimpleNamespace(data=types.SimpleNamespace(ptr=64)))


def test_what_follows_a_step_goes_to_its_stream(streams: Streams) -> None:
    """The sampler launches on the current stream: behind the step, also in the step whose graph is captured."""
    stream = FakeStream(streams)
    graphs, where = DecodeGraphs(stage, stream), []

    def forward(step: Any) -> str:
        assert streams.current is stream
        where.append("captured" if stream.is_capturing else "run")
        return "logits"

    stream.use()  # by the backend, when it stages the batch
    for _ in range(4):
        assert graphs.run(one_token(), forward) == "logits"
        assert streams.current is stream and not stream.is_capturing
    assert where == ["run", "captured"] and graphs.n_graphs == 1
    assert stream.log == ["upload", "launch", "launch", "launch"]


def test_a_capture_that_fails_is_ended(streams: Streams) -> None:
    stream = FakeStream(streams)
    graphs, calls = DecodeGraphs(stage, stream), []

    def forward(step: Any) -> str:
        calls.append(step)
        if len(calls) == 2:
            raise ValueError("no")
        return "logits"

    stream.use()
    graphs.run(one_token(), forward)
    with pytest.raises(ValueError, match="no"):
        graphs.run(one_token(), forward)
    assert streams.current is stream and not stream.is_capturing and graphs.n_graphs == 0
    assert graphs.run(one_token(), forward) == "logits" and graphs.n_graphs == 1


@pytest.mark.gpu
def test_the_current_stream_of_a_gpu_is_the_step_s() -> None:
    import cupy

    from rimuru.ops.cuda import CudaOps

    ops = CudaOps()
    previous = ops.upload(np.array([7], np.int32))

    def forward(step: Any) -> Any:
        ops.take_tokens(step.token_ids, previous)
        return previous

    for _ in range(4):
        ops.run_decode(one_token(), forward)
        assert cupy.cuda.get_current_stream().ptr == ops.stream.ptr
    assert ops.graphs.n_graphs == 1
    ops.close()
