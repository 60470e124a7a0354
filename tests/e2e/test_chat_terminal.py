"""`rimuru run` as a person meets it: a chat in a real terminal. Interrupts, history, commands, the end."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_model import CHATML, write_script_model

ROOT = Path(__file__).resolve().parents[2]
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """A program on a pseudo-terminal of 80 columns."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(slave)
        self.text = ""

    def read_until(self, pattern: str, seconds: float = 60.0) -> str:
        """What has come up to and with a match of the pattern; taken off the front of `text`."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text[-2000:]!r}"
            try:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # the program has ended
                raise AssertionError(f"no {pattern!r} before the end, but {self.text[-2000:]!r}") from None
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self.master)


def _own_terminal() -> None:
    """In the child: the terminal sends its signals here."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("chat") / "script.gguf", context=32768)


@pytest.fixture
def chat(model: Path) -> Iterator[Terminal]:
    terminal = Terminal(
        sys.executable, "-m", "rimuru", "run", str(model), "--device", "cpu", "--threads", "2", "--temp", "0",
        "-n", "30000", "--ignore-eos",
    )  # fmt: skip
    yield terminal
    terminal.close()


def test_a_conversation(chat: Terminal) -> None:
    start = chat.read_until(r"\n> ")
    assert "loaded in" in start and "experts resident" in start and "forecast: about" in start and "/reset" in start

    chat.type("hello\r")
    chat.read_until("ABCDEFG")
    chat.type(CTRL_C)
    assert "Traceback" not in chat.read_until(r"\[stopped\]\s+> ", 20)
    assert chat.process.poll() is None, "an interrupt ended the program"

    chat.type("/stats\r")
    assert re.search(r"\d+ tokens, first after \d+ ms", chat.read_until(r"\n> "))
    chat.type("/memory\r")
    memory = chat.read_until(r"\n> ")
    assert "kv" in memory and "hit rate" in memory and "free" in memory

    chat.type(UP + UP + UP + "\r")  # the first message again, by the line editor's history
    assert "hello" in chat.read_until("ABCDEFG")
    chat.type(CTRL_C)
    chat.read_until(r"\[stopped\]\s+> ", 20)

    chat.type("/reset\r")
    chat.read_until(r"forgotten\s+> ")
    chat.type("half a line")
    chat.read_until("half a line")
    time.sleep(0.3)  # Python's line editor misses a signal that comes between the echo and its waiting for a key
    chat.type(CTRL_C)
    chat.read_until(r"\n> ")
    assert chat.process.poll() is None
    chat.type("/exit\r")
    assert chat.process.wait(20) == 0


def test_ctrl_d_ends_and_the_pages_are_free_after_an_interrupt(chat: Terminal) -> None:
    chat.read_until(r"\n> ")
    for _ in range(3):
        chat.type("hello\r")
        chat.read_until("ABCDEFG")
        chat.type(CTRL_C)
        chat.read_until(r"\[stopped\]\s+> ", 20)
    chat.type("/memory\r")
    assert "free" in chat.read_until(r"\n> ")
    chat.type(CTRL_D)
    assert chat.process.wait(20) == 0


def test_channels_are_not_shown_and_not_sent_back(tmp_path: Path) -> None:
    """gpt-oss' template refuses a conversation whose earlier answers still have the marks of its channels."""
    words = ["<|channel|>", "analysis", "<|message|>", "hm.", "<|end|>", "<|start|>assistant", "<|channel|>final"]
    words += ["<|message|>Fi", "ne."]
    refuses = (
        "{# <|channel|> <|message|> #}{% for m in messages %}{% if '<|message|>' in m.content %}"
        "{{ raise_exception('marks in an earlier answer') }}{% endif %}{% endfor %}"
    )
    path = write_script_model(
        tmp_path / "script.gguf", words, refuses + CHATML, control=[*words[:5:2], "<|call|>", "<|return|>"]
    )
    chat = Terminal(
        sys.executable, "-m", "rimuru", "run", str(path), "--device", "cpu", "--threads", "2", "--temp", "0"
    )
    try:
        chat.read_until(r"\n> ")
        for _ in range(2):
            chat.type("hello\r")
            seen = chat.read_until(r"\n> ")
            assert re.search(r"hm\.\s+Fine\.\s+> ", seen) and "<|" not in seen
        chat.type("/exit\r")
        assert chat.process.wait(20) == 0
    finally:
        chat.close()
