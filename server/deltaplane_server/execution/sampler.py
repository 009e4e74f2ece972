"""Draws the next token of each sequence of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaplane_kernels.sampling import Draws, draw
from deltaplane_server.execution import logit_edits
from deltaplane_server.execution.array_transfer import to_device
from deltaplane_server.execution.logit_edits import LogitEdits
from deltaplane_server.scheduling.plan import SampledToken
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence

_UINT64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the rows that asked for them.

    rows: [r] in the batch, rising.  chosen: [r].
    top, top_ids: [r, k], falling, k the most that a row asked for.
    """

    rows: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def start_copy(self) -> "Logprobs":
        """See SampledBatch.start_copy."""
        return Logprobs(self.rows, _pinned(self.chosen), _pinned(self.top), _pinned(self.top_ids))


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What sample() drew.

    tokens: [R], int64, in the order of `sequences`.
    """

    sequences: Sequence[TokenSequence]
    tokens: Tensor
    logprobs: Logprobs | None

    def start_copy(self) -> "SampledBatch":
        """Its tensors in pinned memory of the host, once the copies that this puts on the current stream of
        their GPU are done."""
        logprobs = self.logprobs.start_copy() if self.logprobs is not None else None
        return SampledBatch(self.sequences, _pinned(self.tokens), logprobs)

    def to_host(self) -> list[SampledToken]:
        """A token for each sequence, in their order. Waits for tensors that are still on a device."""
        tokens = self.tokens.tolist()
        if self.logprobs is None:
            return [SampledToken(s, token) for s, token in zip(self.sequences, tokens, strict=True)]
        reports = dict(
            zip(
                self.logprobs.rows,
                zip(
                    self.logprobs.chosen.tolist(),
                    self.logprobs.top_ids.tolist(),
                    self.logprobs.top.tolist(),
                    strict=True,
                ),
                strict=True,
            )
        )
        sampled = []
        for row, (sequence, token) in enumerate(zip(self.sequences, tokens, strict=True)):
            logprob, ids, values = reports.get(row, (None, (), ()))
            top = tuple(zip(ids, values, strict=True))[: sequence.sampling.logprobs]
            sampled.append(SampledToken(sequence, token, logprob, top))
        return sampled


class Sampler:
    """Draws tokens as SamplingParams and StopParams.min_tokens say, all sequences of a step together.

    The randomness of a draw is a hash of the sequence's seed and of the tokens that it has drawn so far, in
    number: an output depends neither on what else is in the batch nor on preemptions. A sequence without a
    seed draws as with seed 0; requests without one are given theirs when their sequences are made.

    The host never waits for a GPU.
    """

    def __init__(self) -> None:
        self._edits = LogitEdits()

    def sample(
        self, logits: Tensor, sequences: Sequence[TokenSequence], unread: Tensor | None = None
    ) -> SampledBatch:
        """logits: [R, V], float32, contiguous, what the model says after each sequence's last token;
            overwritten.
        unread: [R], int64, on the device of the logits: the pending token of each sequence that has one, of
            any value for the others; None where no sequence has one.
        """
        vocab_size = logits.shape[1]
        reported = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
        arrays = _draws(sequences, vocab_size) | self._edits.of(sequences, vocab_size)
        if reported:
            arrays["reported"] = np.array(reported, dtype=np.int64)
        sent = to_device(arrays, logits.device)
        logprobs = logits.index_select(0, sent["reported"]).log_softmax(-1) if reported else None
        logit_edits.apply(logits, sent, unread)
        draws = Draws(sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"], sent["noise"])
        tokens = draw(logits, draws)
        if logprobs is None:
            return SampledBatch(sequences, tokens, None)
        chosen = logprobs.gather(1, tokens.index_select(0, sent["reported"])[:, None])[:, 0]
        top, top_ids = logprobs.topk(max(sequences[row].sampling.logprobs or 0 for row in reported))
        return SampledBatch(sequences, tokens, Logprobs(reported, chosen, top, top_ids))

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept of a finished sequence: its token counts."""
        self._edits.forget(sequence)


def draws_likeliest(sequence: TokenSequence) -> bool:
    """Whether the next token is the one with the highest logit, and nothing else is asked."""
    params = sequence.sampling
    return (
        params.is_greedy
        and params.logprobs is None
        and not params.has_penalties
        and not params.logit_bias
        and sequence.num_drawn >= sequence.stop.min_tokens
    )


def _draws(sequences: Sequence[TokenSequence], vocab_size: int) -> dict[str, NDArray[np.generic]]:
    """The fields of kernels.sampling.Draws."""
    params = [sequence.sampling for sequence in sequences]
    return {
        "noise": _noise(sequences),
        "temperature": np.array([p.temperature for p in params], dtype=np.float32),
        "top_k": np.array([min(p.top_k, vocab_size) for p in params], dtype=np.int32),
        "top_p": np.array([p.top_p for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
    }


def _noise(sequences: Sequence[TokenSequence]) -> NDArray[np.int64]:
    """[R], 64 random bits each: of the stream that a seed starts, at the number of tokens drawn."""
    seeds = np.array([(s.sampling.seed or 0) & _UINT64 for s in sequences], dtype=np.uint64)
    num_drawn = np.array([s.num_drawn for s in sequences], dtype=np.uint64)
    return _mix(_mix(seeds + _GOLDEN) + num_drawn * _GOLDEN).view(np.int64)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
