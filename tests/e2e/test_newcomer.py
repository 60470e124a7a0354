"""What somebody meets who has just installed it: hints, exit codes, what is shown and what is not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_model import write_script_model

from rimuru import LLM, SamplingParams
from rimuru.base.errors import BadInputError, ContextLengthError
from rimuru.base.extras import install_command
from rimuru.base.screen import brief, for_stream, visible
from rimuru.cli import main
from rimuru.commands import common
from rimuru.simulate.cards import CARDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("newcomer") / "script.gguf", context=256)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_reach_files_but_no_terminal() -> None:
    text = "a\x1b[2Jb\tc\nd\x00\x7f\x9b鬱"
    assert for_stream(text, io.StringIO()) == text
    shown = for_stream(text, Terminal())
    assert shown == "a\u241b[2Jb\tc\nd\u2400\u2421\ufffd鬱"
    assert visible(shown) == shown
    assert all(not 0 <= ord(c) < 32 or c in "\t\n" for c in visible("".join(map(chr, range(0x180)))))


def test_input_that_the_caller_closed_is_an_end_of_input() -> None:
    """`<&-`, as some supervisors start programs: the chat ends at once, and not by an internal error."""
    command = "import sys, os; os.close(0); sys.stdin = None; from rimuru.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "run", "demo", "--device", "cpu", "-n", "4"],
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 and "internal error" not in done.stderr, done.stderr


def test_messages_stay_short_and_harmless() -> None:
    assert brief("one\ntwo   three") == "one two three"
    long = brief("file: key " + "\x1bx" * 5000 + " is wrong")
    assert brief("x" * 80, 80) == "x" * 80 and len(brief("x" * 81, 80)) == 80
    assert len(long) <= 2000 and "\x1b" not in long and long.endswith("is wrong") and long.startswith("file: key")


def test_damaged_names_of_keys_are_shortened(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The length of the first key's name damaged: a page of the file becomes its name."""
    data = bytearray(model.read_bytes())
    data[24:32] = (3000).to_bytes(8, "little")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    assert main(["run", str(damaged), "-p", "x"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "damaged.gguf" in err and len(err) < 400 and err.rstrip().isprintable()


def test_hints_install_by_path(tmp_path: Path) -> None:
    """In an index the name may be somebody else's package: no hint may send anybody there."""
    assert "'.[server]'" in install_command("server")
    root = Path(__file__).resolve().parents[2]
    for file in [*(root / "rimuru").rglob("*.py"), root / "README.md"]:
        text = file.read_text(encoding="utf-8")
        assert "pip install rimuru" not in text and "pip install 'rimuru" not in text, file
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert "`rimuru serve` needs `pip install '.[server]'`" in readme


def test_serving_without_its_packages_is_one_line(model: Path) -> None:
    blocked = "import sys; sys.modules['fastapi'] = None; from rimuru.cli import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run([sys.executable, "-c", blocked, "serve", str(model)], capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "fastapi" in result.stderr and "'.[server]'" in result.stderr


@pytest.mark.parametrize("card", sorted(CARDS))
def test_a_named_card_brings_its_memory(model: Path, card: str, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> dict[str, object]:
        assert main(["inspect", str(model), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    gib = CARDS[card].memory_gib
    assert planned("--card", card) == planned("--card", card, "--memory", str(int(int(gib * 2**30) * 0.8)))


def test_long_silences_are_filled_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(common, "NEXT_LINES_S", 0.01)
    bars, seen = common.LoadBars(quiet=False), ""
    for call in (("weights", 1 << 20, 2 << 20), ("kernels", 0, 1), ("kernels", 3, 8)):
        bars(*call)
        before = len(seen.splitlines())
        while len(seen.splitlines()) < before + 2:  # the second line was written after the call
            seen += capsys.readouterr().err
    bars.close()
    capsys.readouterr()
    assert "weights, 1.0 MiB of 2.0 MiB" in seen and "compiling kernels (3 of 8)" in seen
    assert "compiling kernels, which" in seen and all(line.startswith("loading: ") for line in seen.splitlines())
    quiet = common.LoadBars(quiet=True)
    quiet("kernels", 0, 1)
    quiet.close()
    assert capsys.readouterr().err == ""


def test_no_line_where_loading_is_quick(model: Path) -> None:
    arguments = [sys.executable, "-m", "rimuru", "run", str(model), "-p", "A", "-n", "3", "--temp", "0", "-q"]
    result = subprocess.run([*arguments, "--device", "cpu"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "BCD\n", "")


def test_raising_the_context_is_advised_only_where_it_can_be_raised(model: Path) -> None:
    with LLM(model, device="cpu", context=100) as llm, pytest.raises(ContextLengthError, match="raise --ctx"):
        llm.generate("A" * 150)
    with LLM(model, device="cpu") as llm, pytest.raises(ContextLengthError) as refused:
        llm.generate("A" * 300)
    assert "--ctx" not in str(refused.value) and "256" in str(refused.value)


def test_a_full_conversation_says_how_to_go_on(model: Path) -> None:
    arguments = [sys.executable, "-m", "rimuru", "run", str(model), "--temp", "0", "-n", "30", "--device", "cpu"]
    talk = "".join(f"{'hello ' * 9}{i}\n" for i in range(4)) + "/reset\nhi\n"
    result = subprocess.run(arguments, input=talk, capture_output=True, text=True)
    told = [line for line in result.stderr.splitlines() if "/reset forgets" in line and "shorten" in line]
    assert result.returncode == 0 and told and result.stdout.endswith("XYZ\n"), result.stderr


def test_logits_need_an_idle_engine_and_say_so(model: Path) -> None:
    with LLM(model, device="cpu") as llm:
        stream = llm.stream("0", SamplingParams(max_tokens=20, temperature=0))
        next(stream)
        with pytest.raises(BadInputError, match="while requests run"):
            llm.logits([1, 2, 3])
        assert "while requests are in flight" in (LLM.logits.__doc__ or "")
        stream.close()  # type: ignore[attr-defined]
        assert llm.logits([1, 2, 3]).shape[0] == 3


def test_the_reason_for_the_cpu_is_told_once(model: Path) -> None:
    """`serve` logs at level info, and shows the summary."""
    talk = "import rimuru.server.run as r; r.serve = lambda *a: None\nfrom rimuru.cli import main; import sys\n"
    talk += "sys.exit(main(sys.argv[1:]))"
    pytest.importorskip("fastapi")
    result = subprocess.run([sys.executable, "-c", talk, "serve", str(model)], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.count("running on the CPU") <= 1, result.stderr


def test_what_does_not_fit_gets_no_forecast(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    command = ["inspect", str(model), "--device", "cpu", "--memory"]
    assert main([*command, "64KiB"]) == 0
    assert "forecast    none: the model does not fit" in capsys.readouterr().out
    assert main([*command, "64MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["tokens_per_s"] > 0
