"""Traces of any shape: what is a request is taken, what is none is refused with its line, and nothing runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rimuru.base.errors import BadInputError
from rimuru.cli import main
from rimuru.simulate.simulator import _own_token
from rimuru.simulate.traces import TraceRequest, cut_to_context, read_trace

PLAIN = "prompt_tokens,output_tokens\n"
TIMED = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace_of(tmp_path: Path, text: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def row(timestamp: str = "0", n_prompt: str = "5", n_output: str = "6", more: str = "") -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {n_prompt}, "output_length": {n_output}{more}}}\n'


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + "5,6\n",
        "\ufeff" + PLAIN + "5,6\n",
        " prompt_tokens , output_tokens ,\n\n  \n 5 , 6.0 ,\n",
        "output_tokens,prompt_tokens\r\n6,5\r\n",
        TIMED + "2024-05-10T00:00:00Z,5,6\n",
        row(),
        "\ufeff\n \n" + row() + "\n",
        row(n_prompt="5.0", n_output='"6"'),
        row("-7e3"),
    ],
)
@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace"])
def test_the_content_says_what_a_file_is(tmp_path: Path, text: str, name: str) -> None:
    assert read_trace(trace_of(tmp_path, text, name)) == [TraceRequest(0.0, 5, 6)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (PLAIN + "5,6\n\n5,x\n", ", line 4: output_tokens must be a whole number of at least 1, got 'x'"),
        (PLAIN + "0,6\n", ", line 2: prompt_tokens must be .*got '0'"),
        (PLAIN + "5,-6\n", ", line 2: output_tokens must be .*got '-6'"),
        (PLAIN + "5,6.5\n", ", line 2: output_tokens must be .*got '6.5'"),
        (PLAIN + "5\n", ", line 2: output_tokens must be .*there is none"),
        (PLAIN + "5," + "9" * 5000 + "\n", ", line 2: output_tokens must be .*9{39}\\.\\.\\."),
        ("\n" + PLAIN + '5,"' + "6" * 200_000 + '"\n', "line 3 is no line of a CSV; a trace is a CSV"),
        ("prompt_tokens\n5\n", "it lacks output_tokens; a trace is a CSV"),
        ("name,value\nx,1\n", "it lacks TIMESTAMP; a trace is a CSV"),
        (TIMED + "2023-11-16 18:17:03.97996,5,6\nnow,5,6\n", ", line 3: TIMESTAMP must be a time .*got 'now'"),
        (TIMED, "has no requests"),
        (" \n\n", "has no requests"),
        (row() + "\n" + row("NaN"), ", line 3: timestamp must be a number of milliseconds, got nan"),
        (row("Infinity"), ", line 1: timestamp must .*got inf"),
        (row("1" + "0" * 400), ", line 1: timestamp must .*got 10+"),
        (row('"2"'), ", line 1: timestamp must .*got '2'"),
        (row("null"), ", line 1: timestamp must .*there is none"),
        (row("true"), ", line 1: timestamp must .*got True"),
        (row(n_prompt="0"), ", line 1: input_length must .*got 0"),
        (row(n_output="-1"), ", line 1: output_length must .*got -1"),
        (row(n_output="1.5"), ", line 1: output_length must .*got 1.5"),
        (row(n_output="Infinity"), ", line 1: output_length must .*got inf"),
        (row(n_output="true"), ", line 1: output_length must .*got True"),
        (row(n_output="[1]"), r", line 1: output_length must .*got \[1\]"),
        (row() + row(more=', "hash_ids": null'), ", line 2: hash_ids must be a list of whole numbers"),
        (row(more=', "hash_ids": [1, "a"]'), r", line 1: hash_ids must .*got \[1, 'a'\]"),
        (row(more=', "hash_ids": [-1]'), r", line 1: hash_ids must .*got \[-1\]"),
        (row(more=f', "hash_ids": [{2**31}]'), ", line 1: hash_ids must .*got "),
        ("\n" + row() + "{}\n", "line 3 lacks timestamp; a trace is a CSV"),
        ("[]", "line 1 is no JSON object; a trace is a CSV"),
        (row() + "{oh\n", "line 2 is not JSON; a trace is a CSV"),
        ("[" * 100_000, "line 1 is not JSON; a trace is a CSV"),
        (b"\xff\xfe\x00", "it is not UTF-8 text; a trace is a CSV"),
        (row("-1e308") + row("1e308"), "the arrival times of .* reach further than 1e.09 s"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(tmp_path: Path, text: str | bytes, what: str) -> None:
    path = trace_of(tmp_path, text)
    with pytest.raises(BadInputError, match=what) as refused:
        read_trace(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_only_the_rows_that_are_asked_for_are_looked_at(tmp_path: Path) -> None:
    assert len(read_trace(trace_of(tmp_path, PLAIN + "5,6\n5,x\n"), 1)) == 1


def test_times_before_the_epoch_are_times(tmp_path: Path) -> None:
    path = trace_of(tmp_path, row("-3000", "7") + row("-5000"))
    assert read_trace(path, stretch=2.0) == [TraceRequest(0.0, 5, 6), TraceRequest(4.0, 7, 6)]
    zones = TIMED + "2024-05-10 02:00:01.5000000+02:00,7,6\n2024-05-10 00:00:00,5,6\n"
    assert read_trace(trace_of(tmp_path, zones)) == [TraceRequest(0.0, 5, 6), TraceRequest(1.5, 7, 6)]


def test_rates_that_no_clock_can_follow_are_refused(tmp_path: Path) -> None:
    for more in ({"rate": 1e-320}, {"rate": 1e-9}):
        with pytest.raises(BadInputError, match="larger --rate"):
            read_trace(trace_of(tmp_path, PLAIN + "5,6\n" * 9), **more)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="smaller --stretch"):
        read_trace(trace_of(tmp_path, row() + row("1")), stretch=1e300)


def test_requests_are_cut_to_the_context() -> None:
    lengths = [(60, 40), (60, 41), (500, 10), (10, 10**9), (10**20, 10**20), (99, 2)]
    trace = [TraceRequest(float(i), *tokens, (3,)) for i, tokens in enumerate(lengths)]
    found, n_cut = cut_to_context(trace, 100)
    assert n_cut == 5 and found[0] == trace[0]
    assert [(r.n_prompt, r.n_output) for r in found] == [(60, 40), (59, 41), (90, 10), (10, 90), (50, 50), (98, 2)]
    assert [(r.arrival_s, r.prefix) for r in found] == [(r.arrival_s, r.prefix) for r in trace]
    for context_tokens in (2, 3, 7):
        for request in cut_to_context(trace, context_tokens)[0]:
            assert request.n_prompt >= 1 and request.n_output >= 1
            assert request.n_prompt + request.n_output == context_tokens
    with pytest.raises(BadInputError, match="no room"):
        cut_to_context(trace, 1)


def test_the_tokens_of_a_millionth_request_are_token_ids() -> None:
    assert _own_token(0) == 4096 and _own_token(1) == 8192
    assert all(0 <= _own_token(number) < 2**31 for number in (2**19 - 2, 2**19 - 1, 2**19, 10**6))


def test_the_context_bounds_what_the_command_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(tmp_path, PLAIN + f"10,{10**9}\n5,6\n{10**12},7\n")
    words = ["simulate", "demo", "--trace", str(path), "--memory", "100MB", "--json"]
    assert main([*words, "--ctx", "64"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["output_tokens"] == 54 + 6 + 7
    assert "2 of 3 requests were longer than the context of 64 tokens and are cut to it" in err
    assert report["quant"] == "q5_1/q8_0/f32"
    assert main([*words, "--requests", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2048 - 10


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ctx", "0"], "context must be a whole number of at least 1"),
        (["--ctx", "1"], "give a larger --ctx"),
        (["--ctx", "9999"], "--ctx 9999 is more than the model's context of 2048 tokens"),
        (["--expert-offload-limit", "-1"], "expert_offload_limit must be a whole number of at least 0, got -1"),
        (["--buffer-experts", "-1"], "--buffer-experts must be at least 0"),
        (["--device", "cpu"], "leave out --device"),
        (["--stretch", "inf"], "--stretch must be more than 0, and finite"),
        (["--rate", "nan"], "--rate must be more than 0, and finite"),
        (["--pcie-gbps", "inf"], "--pcie-gbps must be more than 0, and finite"),
    ],
)
def test_options_without_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    path = trace_of(tmp_path, PLAIN + "5,6\n")
    assert main(["simulate", "demo", "--trace", str(path), "--memory", "100MB", *words]) == 2
    err = capsys.readouterr().err
    assert what in err and len(err.strip().splitlines()) == 1
