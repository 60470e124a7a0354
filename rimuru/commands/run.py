"""rimuru run: one answer, or a chat in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from rimuru.base.errors import BadInputError, ContextLengthError, RimuruError
from rimuru.base.screen import brief, for_stream
from rimuru.base.units import human_bytes
from rimuru.commands.common import note, open_llm, read_text
from rimuru.llm import LLM
from rimuru.request import Piece, SamplingParams
from rimuru.server.answer_parts import AnswerPart, Content, Reasoning
from rimuru.server.harmony import HarmonyParser
from rimuru.server.tool_formats import HARMONY, tool_format


def run(args: argparse.Namespace) -> int:
    """Answer a prompt on stdout and exit, or chat until the end of input."""
    prompt = prompt_text(args)
    params = sampling_params(args)
    ids: list[int] = [] if args.token_ids is None else parse_ids(args.token_ids)

    def check(llm: LLM) -> None:
        """Refuse a prompt that this model cannot take, before anything is printed."""
        nonlocal ids
        if prompt is not None and args.token_ids is None:
            ids = llm.chat_ids([{"role": "user", "content": prompt}]) if args.chat else llm.tokenize(prompt)
        if prompt is not None or args.token_ids is not None:
            llm.loaded.engine.check_prompt(ids)
        else:
            llm.chat_ids([{"role": "user", "content": ""}])

    with open_llm(args, check) as llm:
        if args.token_ids is not None:
            return _run_ids(llm, ids, params)
        if prompt is None:
            return Chat(llm, params).loop()
        rates = _print_stream(llm.stream(ids, params))
        sys.stdout.write("\n")
        if not args.quiet:
            note(rates.line())
    return 0


def prompt_text(args: argparse.Namespace) -> str | None:
    """The prompt of -p or -f; None for an interactive chat."""
    if args.prompt is not None and args.file is not None:
        raise BadInputError("give the prompt with -p or with -f, not both")
    return read_text(args.file) if args.file is not None else args.prompt


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.n_tokens,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(args.stop or ()),
        ignore_eos=args.ignore_eos,
        seed=args.seed,
    )


class Rates:
    """Times of one streamed answer."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.n_tokens = 0
        self.ended = self.started

    def add(self, piece: Piece) -> None:
        self.ended = time.monotonic()
        if self.first_token is None and piece.token_ids:
            self.first_token = self.ended
        self.n_tokens += len(piece.token_ids)

    def line(self) -> str:
        if self.first_token is None:
            return "no tokens"
        decode_s = self.ended - self.first_token
        rate = (self.n_tokens - 1) / decode_s if decode_s > 0 and self.n_tokens > 1 else 0.0
        return f"{self.n_tokens} tokens, first after {(self.first_token - self.started) * 1e3:.0f} ms" + (
            f", then {rate:.1f} tokens per second" if rate else ""
        )


def _print_stream(pieces: Iterator[Piece]) -> Rates:
    rates = Rates()
    for piece in pieces:
        rates.add(piece)
        sys.stdout.write(for_stream(piece.text, sys.stdout))
        sys.stdout.flush()
    return rates


def parse_ids(text: str) -> list[int]:
    """Token ids separated by spaces or commas."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise BadInputError(f"--token-ids takes whole numbers separated by spaces or commas, got {text!r}") from None


def _run_ids(llm: LLM, ids: list[int], params: SamplingParams) -> int:
    """For files without a tokenizer: ids in, ids out."""
    for piece in llm.stream(ids, params):
        sys.stdout.write("".join(f"{token_id} " for token_id in piece.token_ids))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


class Chat:
    """A conversation in the terminal. Ctrl-C stops the answer, Ctrl-D or /exit the program."""

    HELP = "/reset forgets the conversation, /stats and /memory show numbers, /exit ends; Ctrl-C stops an answer"

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.messages: list[dict[str, str]] = []
        self.rates: Rates | None = None

    def loop(self) -> int:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # line editing and history in input()
                import readline  # noqa: F401
        note(self.HELP)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0
            except KeyboardInterrupt:
                note("")
                continue
            text = line.strip()
            if not text:
                continue
            if text.startswith("/"):
                if not self._command(text):
                    return 0
                continue
            self._answer(text)

    def _command(self, text: str) -> bool:
        """Carry out a slash command; False to end."""
        if text in ("/exit", "/quit"):
            return False
        if text == "/reset":
            self.messages = []
            note("the conversation was forgotten")
        elif text == "/stats":
            note(self.rates.line() if self.rates else "nothing was answered yet")
        elif text == "/memory":
            self._show_memory()
        else:
            note(self.HELP)
        return True

    def _show_memory(self) -> None:
        report = self.llm.memory()
        for name, view in report["views"].items():
            note(f"{name:8} {view['pages']:8} pages {human_bytes(view['bytes']):>12}")
        note(f"free     {human_bytes(report['free_bytes'])} of {human_bytes(report['pool_bytes'])}")
        if report["resident_experts"]:
            note(f"experts  {sum(report['resident_experts'])} resident, hit rate {report['hit_rate']:.2f}")

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[threading.Event]:
        """Ctrl-C ends the answer before the engine's next step, never in the middle of one; sets the event."""
        was_stopped = threading.Event()

        def stop(number: int, frame: FrameType | None) -> None:
            was_stopped.set()
            self.llm.cancel_all()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield was_stopped
        finally:
            signal.signal(signal.SIGINT, before)

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        answer, self.rates = Answer(self.llm), Rates()
        stream = self.llm.stream_chat(self.messages, self.params)
        try:
            with self._stoppable() as was_stopped:
                for piece in stream:
                    self.rates.add(piece)
                    sys.stdout.write(for_stream(answer.shown(piece.text), sys.stdout))
                    sys.stdout.flush()
                    if was_stopped.is_set():
                        break
            sys.stdout.write(for_stream(answer.end(), sys.stdout))
            if was_stopped.is_set():
                note(" [stopped]")
        except RimuruError as error:
            hint = "; /reset forgets the conversation" if isinstance(error, ContextLengthError) else ""
            note(brief(str(error)) + hint)
            self.messages.pop()
            return
        finally:
            stream.close()  # type: ignore[attr-defined]
        sys.stdout.write("\n")
        self.messages.append(answer.message)


class Answer:
    """An answer on its way to the screen and into the conversation. Marks of reasoning (<think>) are shown as they
    come: templates find them in earlier answers. Those of channels are not: templates refuse them there."""

    def __init__(self, llm: LLM) -> None:
        chat = llm.loaded.chat
        has_channels = chat is not None and tool_format(chat.source()) is HARMONY
        self._reader = HarmonyParser(None) if has_channels else None
        self._content = self._reasoning = ""

    def shown(self, text: str) -> str:
        """What of a piece of text is written to the screen."""
        return self._take([Content(text)] if self._reader is None else self._reader.push(text))

    def end(self) -> str:
        """What is left to write."""
        return "" if self._reader is None else self._take(self._reader.finish())

    @property
    def message(self) -> dict[str, str]:
        """The answer as the conversation keeps it."""
        message = {"role": "assistant", "content": self._content}
        return message | {"reasoning_content": self._reasoning} if self._reasoning else message

    def _take(self, parts: list[AnswerPart]) -> str:
        shown = ""
        for part in parts:
            if isinstance(part, Reasoning):
                self._reasoning += part.text
                shown += part.text
            elif isinstance(part, Content):
                shown += "\n\n" + part.text if self._reasoning and not self._content else part.text
                self._content += part.text
        return shown
