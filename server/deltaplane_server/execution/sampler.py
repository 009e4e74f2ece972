"""Draws the next token of each sequence of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaplane_server.execution.token_counts import TokenCounts
from deltaplane_server.execution.truncation import Limits, likeliest
from deltaplane_server.scheduling.plan import SampledToken
from deltaplane_server.scheduling.sampling_params import SamplingParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence

_SEEDS = 1 << 64


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

    A sequence draws from its own random state, which moves on once per drawn token: its output depends
    neither on what else is in the batch nor on preemptions.
    """

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}
        self._counts: dict[int, TokenCounts] = {}

    def sample(
        self, logits: Tensor, sequences: Sequence[TokenSequence], unread: Tensor | None = None
    ) -> SampledBatch:
        """logits: [R, V], float32, what the model says after each sequence's last token; overwritten."""
        reported = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
        logprobs = logits[reported].log_softmax(-1) if reported else None
        self._penalize(logits, sequences)
        _add_bias(logits, sequences)
        _hold_back_stops(logits, sequences)
        tokens = logits.argmax(-1)
        self._draw(logits, sequences, tokens)
        return SampledBatch(sequences, tokens, _report(logprobs, reported, tokens, sequences))

    def forget(self, sequence: TokenSequence) -> None:
        """Drops the random state and the token counts of a finished sequence."""
        self._generators.pop(sequence.id, None)
        self._counts.pop(sequence.id, None)

    def _penalize(self, logits: Tensor, sequences: Sequence[TokenSequence]) -> None:
        rows = [row for row, s in enumerate(sequences) if s.sampling.has_penalties]
        if not rows:
            return
        counts = [self._updated_counts(sequences[row]) for row in rows]
        sizes = [len(c) for c in counts]
        device = logits.device
        ids = torch.from_numpy(np.concatenate([c.ids for c in counts])).to(device)
        times = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(device)

        def spread(value: Callable[[SamplingParams], float]) -> Tensor:
            values = np.array([value(sequences[row].sampling) for row in rows], dtype=np.float32)
            return torch.from_numpy(np.repeat(values, sizes)).to(device)

        where = (torch.from_numpy(np.repeat(rows, sizes)).to(device), ids)
        values = logits[where]
        repetition = spread(lambda params: params.repetition_penalty)
        values = torch.where(values < 0, values * repetition, values / repetition)
        values -= spread(lambda params: params.presence_penalty) * (times > 0)
        values -= spread(lambda params: params.frequency_penalty) * times
        logits[where] = values

    def _updated_counts(self, sequence: TokenSequence) -> TokenCounts:
        counts = self._counts.setdefault(sequence.id, TokenCounts())
        counts.update(sequence.tokens, sequence.num_prompt)
        return counts

    def _draw(self, logits: Tensor, sequences: Sequence[TokenSequence], tokens: Tensor) -> None:
        """Overwrites the tokens of the rows that are not greedy."""
        drawn = [row for row, s in enumerate(sequences) if not s.sampling.is_greedy]
        if not drawn:
            return
        device = logits.device
        params = [sequences[row].sampling for row in drawn]
        scores = logits[drawn]
        scores -= scores.amax(-1, keepdim=True)
        scores /= torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device)
        uniforms = torch.tensor(
            [self._uniform(sequences[row]) for row in drawn], dtype=torch.float64, device=device
        )
        choices = torch.empty(len(drawn), dtype=torch.int64, device=device)

        whole = [i for i, p in enumerate(params) if not _truncates(p)]
        if whole:
            choices[whole] = _choose(scores[whole].exp(), uniforms[whole])
        cut = [i for i, p in enumerate(params) if _truncates(p)]
        if cut:
            limits = Limits(
                torch.tensor([params[i].top_k for i in cut], device=device),
                torch.tensor([params[i].top_p for i in cut], dtype=torch.float32, device=device),
                torch.tensor([params[i].min_p for i in cut], dtype=torch.float32, device=device),
            )
            places = torch.tensor(cut, device=device)
            for part, weights, ids in likeliest(scores[places], limits):
                ranks = _choose(weights, uniforms[places[part]])
                choices[places[part]] = ids.gather(1, ranks[:, None])[:, 0]
        tokens[drawn] = choices

    def _uniform(self, sequence: TokenSequence) -> float:
        """In [0, 1), the next number of the sequence's own random state."""
        generator = self._generators.get(sequence.id)
        if generator is None:
            generator = self._generators[sequence.id] = torch.Generator()
            if sequence.sampling.seed is None:
                generator.seed()
            else:
                generator.manual_seed(sequence.sampling.seed % _SEEDS)
        return torch.rand((), dtype=torch.float64, generator=generator).item()


def draws_likeliest(sequence: TokenSequence) -> bool:
    """Whether the next token is the one with the highest logit, and nothing else is asked."""
    params = sequence.sampling
    return (
        params.is_greedy
        and params.logprobs is None
        and not params.has_penalties
        and not params.logit_bias
        and sequence.num_output >= sequence.stop.min_tokens
    )


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _add_bias(logits: Tensor, sequences: Sequence[TokenSequence]) -> None:
    biased = [(row, *item) for row, s in enumerate(sequences) for item in s.sampling.logit_bias.items()]
    if biased:
        rows, ids, values = zip(*biased, strict=True)
        logits[list(rows), list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _hold_back_stops(logits: Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Below min_tokens, no token may be drawn that would end the output."""
    held = [
        (row, token)
        for row, s in enumerate(sequences)
        if s.num_output < s.stop.min_tokens
        for token in s.stop.eos_token_ids | s.stop.stop_token_ids
    ]
    if held:
        rows, ids = zip(*held, strict=True)
        logits[list(rows), list(ids)] = -torch.inf


def _choose(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws by the inverse of the cumulative distribution.

    weights: [R, N], float32, at least 0, of any sum. uniforms: [R], float64, in [0, 1).
    Returns [R], int64: the first index whose cumulative weight exceeds the uniform share of the sum, so never
    one of weight 0. Rows of NaN answer N - 1.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _report(
    logprobs: Tensor | None, rows: list[int], tokens: Tensor, sequences: Sequence[TokenSequence]
) -> Logprobs | None:
    if logprobs is None:
        return None
    chosen = logprobs.gather(1, tokens[rows][:, None])[:, 0]
    width = max(sequences[row].sampling.logprobs or 0 for row in rows)
    top, top_ids = logprobs.topk(width)
    return Logprobs(rows, chosen, top, top_ids)


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
