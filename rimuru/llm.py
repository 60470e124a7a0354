"""LLM: the scripting interface. One model, loaded once; `generate`, `stream`, `chat`, `logits`."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.errors import BadInputError, RimuruError
from rimuru.base.fair_lock import FairLock
from rimuru.base.shield import Shield
from rimuru.base.units import parse_bytes
from rimuru.config import EngineConfig
from rimuru.engine.build import LoadedModel, load_model
from rimuru.engine.output import TextOutput
from rimuru.request import Completion, Piece, SamplingParams, Sequence, shown

Prompt = str | Seq[int]


class LLM:
    """A loaded model. Use it as a context manager, or call `close`.

        with LLM("model.gguf", memory="8GiB") as llm:
            print(llm.generate("Once upon a time")[0].text)

    `model` is a GGUF (any part of a split set, or its folder) or a `.rimuru` folder. The keywords are those of
    EngineConfig. All methods may be called from several threads: requests that are in flight at the same time are
    batched, and each gets exactly what it gets alone; only `logits` and `score` begin when none is. After an exception
    (Ctrl-C among them) it can be used on; what was asked for by the call that it left is cancelled.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        memory: int | str | None = None,
        ram: int | str | None = None,
        threads: int | None = None,
        context: int | None = None,
        kv_type: str = "auto",
        policy: str = "auto",
        residency: str = "auto",
        resident_experts: int | float | str | None = None,
        deterministic: bool = False,
        seed: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
        **more: Any,
    ) -> None:
        """`progress(stage, done, total)` is called while loading, in bytes. Raises RimuruError with one line that
        says what is wrong: a bad file, an unsupported model, too little memory."""
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(more) - known)
        if unknown:
            raise TypeError(
                f"LLM() got unexpected keyword(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        config = EngineConfig(
            device=device,  # type: ignore[arg-type]
            memory=memory,
            ram=ram,
            threads=threads,
            context=context,
            kv_type=kv_type,  # type: ignore[arg-type]
            policy=policy,  # type: ignore[arg-type]
            residency=residency,  # type: ignore[arg-type]
            resident_experts=resident_experts,
            deterministic=deterministic,
            seed=seed,
            **more,
        )
        if not isinstance(model, (str, Path)) or not str(model):
            raise BadInputError(f"the model is the name of a file or folder, got {shown(model)}")
        try:
            Path(model).exists()
        except OSError as error:  # a name that no file can have, a folder that may not be looked into
            raise BadInputError(f"cannot open {shown(str(model))}: {error.strerror or error}") from None
        if progress is not None and not callable(progress):
            raise BadInputError(f"progress is called with (stage, done, total); {shown(progress)} cannot be called")
        self._shield = Shield()
        """Whatever changes the engine goes through it: an interrupt never leaves a step half done."""
        self._loaded: LoadedModel | None = load_model(Path(model), config, progress)
        self._lock, self._resizing = FairLock(), threading.Lock()
        self._outputs: dict[int, tuple[Sequence, weakref.ref[TextOutput]]] = {}
        """Answers by sequence. One that nobody holds any more (its caller was interrupted) is cancelled."""
        self._scorings: set[Generator[list[np.ndarray], None, None]] = set()
        """Texts whose rows of logits have not all been taken."""

    # ---- the model
    @property
    def loaded(self) -> LoadedModel:
        """The wired parts (configuration, engine, tokenizer); for tools."""
        if self._loaded is None:
            raise RimuruError("this LLM is closed")
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The file's Tokenizer, or None where it has none."""
        return self.loaded.tokenizer

    @property
    def context_length(self) -> int:
        return self.loaded.engine.context_length

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with BOS as the file says."""
        if not isinstance(text, str):
            raise BadInputError(f"tokenize takes a string, not {type(text).__name__}")
        return self._need_tokenizer().encode_prompt(text)

    def detokenize(self, ids: Seq[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        if not isinstance(ids, (Seq, np.ndarray)) or isinstance(ids, (str, bytes)) or not _are_ids(ids):
            raise BadInputError(f"detokenize takes a list of token ids, got {shown(ids)}")
        return self._need_tokenizer().decode([int(i) for i in ids])

    def _need_tokenizer(self) -> Any:
        if self.loaded.tokenizer is None:
            raise BadInputError("this file has no tokenizer: use token ids instead of text")
        return self.loaded.tokenizer

    # ---- answers
    def generate(self, prompts: Prompt | Seq[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Answers to one prompt or to several, in order; several decode together.

        A prompt is text or a list of token ids. With params.n > 1 the further answers are in `.alternatives`.
        """
        batch = self._as_batch(prompts)
        params = _as_params(params)
        outputs: list[list[TextOutput]] = []
        was_left = threading.Event()
        try:
            for ids in batch:  # inside, so that a prompt that is refused takes those before it along
                outputs.append(self._shield.call(self._start, ids, params))
            self._shield.call(self._run_until, [o for answers in outputs for o in answers], was_left)
            return [self._collect(answers) for answers in outputs]
        finally:
            was_left.set()
            self._shield.call(self._forget, [o for answers in outputs for o in answers])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """The answer as it comes. Leaving the loop early cancels the request."""
        ids = self._as_ids(prompt)
        yield from self._stream(ids, _as_params(params))

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """The answer to a conversation, through the file's chat template."""
        return self.generate([self.chat_ids(messages, tools)], params)[0]

    def chat_ids(
        self, messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation that is to be answered. Control tokens in message texts are plain text."""
        if self.loaded.chat is None:
            raise BadInputError("this file has no tokenizer: a conversation cannot be put into tokens")
        return self.loaded.chat.encode(messages, tools, **variables)

    def stream_chat(self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Like `stream`, for a conversation."""
        yield from self._stream(self.chat_ids(messages), _as_params(params))

    def logits(self, token_ids: Seq[int], chunk: int | None = None) -> np.ndarray:
        """float32 [n, n_vocab]: next-token logits after each of the n tokens, which start at position 0. Raises
        BadInputError while requests are in flight.

        `chunk` = tokens per forward pass (default: as many as fit, within 256 MiB of logits); it does not change the
        result on the CPU.
        """
        return np.concatenate(list(self.score(token_ids, chunk)))

    def score(self, token_ids: Seq[int], chunk: int | None = None) -> Iterator[np.ndarray]:
        """The rows of `logits` in order, a few at a time, for texts whose logits would not fit in memory. Raises
        BadInputError, at the first row, while requests are in flight; once it has begun other methods may be called."""
        ids = self._as_ids(token_ids)
        if chunk is not None and (not isinstance(chunk, (int, np.integer)) or chunk < 1):
            raise BadInputError(f"chunk must be a whole number of at least 1, got {shown(chunk)}")
        if len(ids) > self.context_length:
            raise BadInputError(f"{len(ids)} tokens do not fit in the context of {self.context_length}")
        self._check_ids(ids)
        pieces = self.loaded.engine.score(ids, chunk)
        self._scorings.add(pieces)
        try:
            while True:
                rows = self._shield.call(self._next_rows, pieces)
                if rows is None:
                    return
                yield from rows
        finally:
            self._shield.call(self._end_scoring, pieces)

    def _next_rows(self, pieces: Generator[list[np.ndarray], None, None]) -> list[np.ndarray] | None:
        with self._lock:  # not while the caller looks at the rows
            self._cancel_left()
            return next(pieces, None) if self.loaded else None

    def _end_scoring(self, pieces: Generator[list[np.ndarray], None, None]) -> None:
        with self._lock:
            pieces.close()
            self._scorings.discard(pieces)

    def cancel_all(self) -> None:
        """End all answers in flight before the engine's next step. For any thread, and for handlers of signals."""
        for sequence, _ in list(self._outputs.values()):
            self.loaded.engine.abort(sequence)

    # ---- memory
    def memory(self) -> dict[str, Any]:
        """The pool as numbers (keys: design of `/v1/memory`)."""
        return self._shield.call(self._memory)

    def _memory(self) -> dict[str, Any]:
        with self._lock:
            self._cancel_left()
            return self.loaded.memory_report()

    def resize(self, memory: int | str) -> None:
        """Change the memory budget while requests run."""
        self._shield.call(self._resize, parse_bytes(memory))

    def _resize(self, memory_bytes: int) -> None:
        with self._resizing:
            pieces, is_done = self.loaded.resize_steps(memory_bytes), False
            while not is_done:
                with self._lock:  # not over all pieces: other threads' requests run between them
                    is_done = self._loaded is None or next(pieces, True) is True

    def close(self) -> None:
        """Give everything back. Further calls raise."""
        if self._loaded is not None:
            self._shield.call(self._close)
            self._shield.close()

    def _close(self) -> None:
        with self._lock:
            if self._loaded is not None:
                for pieces in self._scorings:
                    pieces.close()
                self._loaded.close()
                self._loaded = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside
    def _as_batch(self, prompts: Any) -> list[list[int]]:
        if not isinstance(prompts, (str, Seq, np.ndarray)):
            raise BadInputError(f"a prompt is a string or a list of token ids, not {type(prompts).__name__}")
        if isinstance(prompts, (str, bytes)) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
            return [self._as_ids(prompts)]
        return [self._as_ids(prompt) for prompt in prompts]

    def _as_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        if not isinstance(prompt, (Seq, np.ndarray)) or isinstance(prompt, bytes):
            raise BadInputError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
        if not _are_ids(prompt):
            raise BadInputError("a prompt is a string or a list of token ids")
        return [int(i) for i in prompt]

    def _check_ids(self, ids: list[int]) -> None:
        n_vocab = self.loaded.engine.n_vocab
        if not ids:
            raise BadInputError("no tokens were given")
        if min(ids) < 0 or max(ids) >= n_vocab:
            raise BadInputError(f"token ids must lie in 0..{n_vocab - 1}")

    def _start(self, ids: list[int], params: SamplingParams) -> list[TextOutput]:
        with self._lock:
            engine, tokenizer = self.loaded.engine, self.loaded.tokenizer
            answers = []
            for index in range(params.n):
                output = TextOutput(engine.add(ids, params, index), tokenizer)
                self._outputs[output.sequence.seq_id] = (output.sequence, weakref.ref(output))
                answers.append(output)
            return answers

    def _step(self) -> None:
        """One step of the engine, and the new tokens' text. The lock is held, so any waiting thread may do it."""
        self._cancel_left()
        engine = self.loaded.engine
        report = engine.step()
        for sequence in report.advanced:
            _, output = self._outputs.get(sequence.seq_id, (None, _nothing))
            found = output()
            if found is not None and found.advance():
                engine.finish(sequence)

    def _cancel_left(self) -> None:
        """End answers that nobody can take any more. The lock is held."""
        for seq_id, (sequence, output) in list(self._outputs.items()):
            if output() is None:
                del self._outputs[seq_id]
                if not sequence.is_finished and self._loaded is not None:
                    self._cancel(sequence)

    def _run_until(self, outputs: list[TextOutput], was_left: threading.Event) -> None:
        """Steps until all are finished, or until their caller has gone."""
        while not was_left.is_set() and not all(output.sequence.is_finished for output in outputs):
            with self._lock:
                if not all(output.sequence.is_finished for output in outputs):
                    self._step()

    def _collect(self, answers: list[TextOutput]) -> Completion:
        completions = [output.completion() for output in answers]
        completions[0].alternatives = completions[1:]
        return completions[0]

    def _forget(self, outputs: list[TextOutput]) -> None:
        with self._lock:
            for output in outputs:
                self._outputs.pop(output.sequence.seq_id, None)
                if not output.sequence.is_finished and self._loaded is not None:
                    self._cancel(output.sequence)

    def _cancel(self, sequence: Sequence) -> None:
        self.loaded.engine.scheduler.remove(sequence)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        if params.n != 1:
            raise BadInputError("stream gives one answer: n must be 1")
        (output,) = self._shield.call(self._start, ids, params)
        try:
            while True:
                piece, is_last = self._shield.call(self._next_piece, output)
                if output.sequence.error is not None:
                    raise output.sequence.error
                if piece is not None:
                    yield piece
                if is_last:
                    return
        finally:
            self._shield.call(self._forget, [output])

    def _next_piece(self, output: TextOutput) -> tuple[Piece | None, bool]:
        """What has come, and whether nothing more will: other calls may finish the answer while its reader is busy."""
        with self._lock:
            if not output.sequence.is_finished:
                self._step()
            return output.take_piece(), output.sequence.is_finished


def _nothing() -> None:
    """Stands for the reference to an output that is not there."""


def _as_params(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise BadInputError(f"params is a SamplingParams, not {type(params).__name__}")
    return params or SamplingParams()


def _are_ids(values: Any) -> bool:
    return all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in values)
