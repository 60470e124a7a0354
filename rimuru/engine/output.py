"""Tokens -> text of one sequence: whole characters only, nothing of a stop string, EOS not shown."""

from __future__ import annotations

from rimuru.request import Completion, Piece, Sequence
from rimuru.text.detokenize import StopMatcher, StreamDecoder
from rimuru.text.tokenizer import Tokenizer


class TextOutput:
    """Follows one sequence; `advance` after every token it got. Without a tokenizer the text stays empty."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, continues=True)
        stops = tuple(sequence.params.stop)
        self._stops = StopMatcher(stops) if stops else None
        self._n_done = 0
        self._n_pieced = 0
        self._pending = ""
        self.text = ""

    def advance(self) -> bool:
        """Take in the sequence's new tokens. True if a stop string ended the text (the engine must finish it)."""
        sequence, stopped = self.sequence, False
        output = sequence.output_ids
        for position in range(self._n_done, len(output)):
            self._n_done += 1
            ended_by_eos = (
                sequence.finish_reason == "stop"
                and position == len(output) - 1
                and output[position] in sequence.eog_ids
            )
            if self._decoder is None or ended_by_eos:
                continue
            stopped = self._take(self._decoder.push(output[position]))
            if stopped:
                sequence.finish_reason = "stop"
                break
        if not stopped and sequence.finish_reason is not None and self._decoder is not None:
            stopped = self._take(self._decoder.flush())
            if not stopped and self._stops is not None:
                self._emit(self._stops.flush())
            if stopped:
                sequence.finish_reason = "stop"
        return stopped

    def _take(self, text: str) -> bool:
        if self._stops is None:
            self._emit(text)
            return False
        emitted, stopped = self._stops.push(text)
        self._emit(emitted)
        return stopped

    def _emit(self, text: str) -> None:
        self.text += text
        self._pending += text

    def take_piece(self) -> Piece | None:
        """What has come since the last piece; None if there is nothing to say yet."""
        sequence = self.sequence
        token_ids = sequence.output_ids[self._n_pieced : self._n_done]
        if not token_ids and not self._pending and not sequence.is_finished:
            return None
        logprobs = sequence.logprobs[self._n_pieced : self._n_done] if sequence.logprobs else None
        piece = Piece(self._pending, token_ids, sequence.finish_reason if sequence.is_finished else None, logprobs)
        self._n_pieced, self._pending = self._n_done, ""
        return piece

    def completion(self) -> Completion:
        """The finished answer. Raises the sequence's error if it failed."""
        sequence = self.sequence
        if sequence.error is not None:
            raise sequence.error
        params = sequence.params
        return Completion(
            text=self.text,
            token_ids=sequence.output_ids,
            finish_reason=sequence.finish_reason or "length",
            prompt_tokens=sequence.n_prompt,
            cached_tokens=sequence.n_reused,
            logprobs=list(sequence.logprobs) if params.want_logprobs or params.logprobs else None,
        )
