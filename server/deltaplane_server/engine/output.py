"""One output of a request, from drawn tokens to deltas: its text, its end, and what is not sent yet."""

from deltaplane_server.engine.api import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    TokenDecoder,
    TokenLogprobs,
    Usage,
)
from deltaplane_server.engine.detokenizer import Detokenizer
from deltaplane_server.engine.stop_strings import StopMatcher
from deltaplane_server.scheduling.plan import SampledToken
from deltaplane_server.scheduling.sequence import Sequence


class Output:
    """What a sequence looks like from outside.

    last_token_time: seconds on the engine's clock; None before the first token.
    """

    def __init__(self, request: GenerationRequest, sequence: Sequence, decoder: TokenDecoder) -> None:
        self.sequence = sequence
        self.last_token_time: float | None = None
        self.is_finished = False
        self._request = request
        self._detokenizer = Detokenizer(decoder, skip_special_tokens=request.skip_special_tokens)
        self._matcher = StopMatcher(request.stop.stop, include_stop=request.stop.include_stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._has_sent = False

    @property
    def is_due(self) -> bool:
        """Whether a delta is to be sent: with the first token, then every `stream_interval` ones."""
        return not self._has_sent or len(self._token_ids) >= self._request.stream_interval

    def accept(self, token: SampledToken) -> Finish | None:
        """Takes in the token that the sequence has just got, and says whether the output ends with it.

        The token of a stop or of the end of sequence has no text.
        """
        self._token_ids.append(token.token_id)
        if token.logprob is not None:
            self._logprobs.append(TokenLogprobs(token.token_id, token.logprob, token.top))
        stop = self.sequence.stop
        counts = self.sequence.num_output >= stop.min_tokens
        if counts and (token.token_id in stop.eos_token_ids or token.token_id in stop.stop_token_ids):
            self._flush(counts=False)
            return Finish(FinishReason.STOP, matched_token=token.token_id)
        self._add(self._detokenizer.push(token.token_id), counts=counts)
        if counts:
            self._look_ahead()
        is_full = self.sequence.num_output >= stop.max_tokens
        if is_full:
            self._flush(counts=counts)
        if self._matcher.matched is not None:
            return Finish(FinishReason.STOP, matched_text=self._matcher.matched)
        return Finish(FinishReason.LENGTH) if is_full else None

    def take_delta(self, finish: Finish | None = None, usage: Usage | None = None) -> OutputDelta:
        """What is new since the last delta. An aborted output also gets the text that was held back."""
        if finish is not None and finish.reason is FinishReason.ABORTED:
            self._flush(counts=False)
        delta = OutputDelta(
            request_id=self._request.request_id,
            index=self.sequence.index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish=finish,
            usage=usage,
        )
        self._has_sent = True
        self.is_finished = finish is not None
        self._text, self._token_ids, self._logprobs = [], [], []
        return delta

    def _add(self, text: str, *, counts: bool) -> None:
        if self._matcher.matched is None:
            self._text.append(self._matcher.push(text, counts=counts))

    def _look_ahead(self) -> None:
        """Finds a stop string that ends in bytes which a following byte could still change: the output is to
        end with them."""
        if self._request.stop.stop and self._detokenizer.in_byte_run:
            tail = self._detokenizer.tail()
            if "\ufffd" not in tail and self._matcher.would_match(tail):
                self._add(tail, counts=True)

    def _flush(self, *, counts: bool) -> None:
        self._add(self._detokenizer.tail(), counts=counts)
        self._text.append(self._matcher.flush())
