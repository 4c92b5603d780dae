"""AnswerText: an answer's ids become its text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from spindle.decode.params import SamplingParams
from spindle.decode.stops import StopScanner
from spindle.tokenizer import StreamDecoder, Tokenizer


class AnswerText:
    """The text of one answer, a delta a token; `text` is all of them so far.

    A delta has no half character and no character of a stop string that matched (`stop` is then
    that string). Special tokens, and the EOS or stop id that ends the answer, are ids without text.
    What the first `min_tokens` tokens complete is no stop.
    """

    def __init__(
        self, decoder: StreamDecoder, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._decoder, self._scanner, self._min_tokens = decoder, StopScanner(stops), min_tokens
        self._pieces: list[str] = []
        self._tokens, self._flushed = 0, False

    @staticmethod
    def of(tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> AnswerText:
        """The text of an answer to this prompt, with the stops of these parameters."""
        decoder = StreamDecoder(tokenizer, prompt_ids=prompt_ids)
        return AnswerText(decoder, params.stop or (), params.min_tokens)

    @property
    def text(self) -> str:
        """The deltas, joined."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._scanner.matched

    def push(self, token: int, ends: bool = False) -> str:
        """The text that this token adds; `ends`: it is the EOS or stop id that ends the answer."""
        self._tokens += 1
        return self._show("" if ends else self._decoder.push(token))

    def flush(self) -> str:
        """The end of the text, once: half a character as U+FFFD, and what was held back.

        An answer of no tokens has no text, wherever the prompt broke off.
        """
        if self._flushed or self.stop is not None or self._tokens == 0:
            return ""
        self._flushed = True
        delta = self._show(self._decoder.flush())
        self._pieces.append(rest := self._scanner.flush())
        return delta + rest

    def _show(self, text: str) -> str:
        delta = self._scanner.push(text, self._tokens > self._min_tokens)
        self._pieces.append(delta)
        return delta
