"""What requests change about single logits before a token is drawn.

In this order: repetition, presence and frequency penalty, logit_bias, tokens held back below min_tokens. The
host says which logits, as places in [R * V]; the device changes them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaplane_server.execution.token_counts import TokenCounts
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence

Arrays = dict[str, NDArray[np.generic]]


class LogitEdits:
    """Keeps the token counts of the sequences that have penalties."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def of(self, sequences: Sequence[TokenSequence], vocab_size: int) -> Arrays:
        """What apply() is to have on the device."""
        return (
            self._penalties(sequences, vocab_size)
            | _biases(sequences, vocab_size)
            | _held_back(sequences, vocab_size)
        )

    def forget(self, sequence: TokenSequence) -> None:
        """Drops the token counts of a finished sequence."""
        self._counts.pop(sequence.id, None)

    def _penalties(self, sequences: Sequence[TokenSequence], vocab_size: int) -> Arrays:
        """Of P sequences with penalties, which have N tokens that the host knows, each once:

        repetition, presence, frequency: [P], float32.
        places, owners, times: [N]; an owner is one of the P, and times, float32, how often its output has the
            token.
        pending, pending_owners: rows, and which of the P they are, whose last token the device alone knows.
        """
        rows = [row for row, s in enumerate(sequences) if s.sampling.has_penalties]
        if not rows:
            return {}
        params = [sequences[row].sampling for row in rows]
        counts = [self._updated_counts(sequences[row]) for row in rows]
        pending = [owner for owner, row in enumerate(rows) if sequences[row].num_pending]
        return {
            "repetition": np.array([p.repetition_penalty for p in params], dtype=np.float32),
            "presence": np.array([p.presence_penalty for p in params], dtype=np.float32),
            "frequency": np.array([p.frequency_penalty for p in params], dtype=np.float32),
            "places": np.concatenate([row * vocab_size + c.ids for row, c in zip(rows, counts, strict=True)]),
            "owners": np.repeat(np.arange(len(rows)), [len(c) for c in counts]),
            "times": np.concatenate([c.output_counts for c in counts]),
            "pending": np.array([rows[owner] for owner in pending], dtype=np.int64),
            "pending_owners": np.array(pending, dtype=np.int64),
        }

    def _updated_counts(self, sequence: TokenSequence) -> TokenCounts:
        counts = self._counts.setdefault(sequence.id, TokenCounts())
        counts.update(sequence.tokens, sequence.num_prompt)
        return counts


def apply(logits: Tensor, edits: dict[str, Tensor], unread: Tensor | None) -> None:
    """Changes the logits. Writes to each in a fixed order or the same value, so a batch gives the same bits.

    logits: [R, V], contiguous. edits: LogitEdits.of(), on the device.
    unread: [R], int64: the last token of each sequence where only the device knows it.
    """
    flat = logits.view(-1)
    if "places" in edits:
        _penalize(flat, edits, logits.shape[1], unread)
    if "biased" in edits:
        places = edits["biased"]
        flat.scatter_(0, places, flat.index_select(0, places) + edits["biases"])
    if "held_back" in edits:
        flat.index_fill_(0, edits["held_back"], -torch.inf)


def _penalize(flat: Tensor, edits: dict[str, Tensor], vocab_size: int, unread: Tensor | None) -> None:
    places, owners, times = edits["places"], edits["owners"], edits["times"]
    if len(edits["pending"]):
        assert unread is not None
        places, owners, times = _with_unread(places, owners, times, edits, vocab_size, unread)
    values = flat.index_select(0, places)
    repetition = edits["repetition"].index_select(0, owners)
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= edits["presence"].index_select(0, owners) * (times > 0)
    values -= edits["frequency"].index_select(0, owners) * times
    flat.scatter_(0, places, values)


def _with_unread(
    places: Tensor, owners: Tensor, times: Tensor, edits: dict[str, Tensor], vocab_size: int, unread: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The unread tokens count as output. Each is a place of its own beside those that are known; where it is
    one of these, both count the same."""
    pending, pending_owners = edits["pending"], edits["pending_owners"]
    new_places = pending * vocab_size + unread.index_select(0, pending)
    place_of_owner = torch.full_like(edits["repetition"], -1, dtype=torch.int64)
    place_of_owner.index_copy_(0, pending_owners, new_places)
    again = places == place_of_owner.index_select(0, owners)
    known_times = torch.zeros_like(edits["repetition"]).index_add_(0, owners, times * again)
    return (
        torch.cat((places, new_places)),
        torch.cat((owners, pending_owners)),
        torch.cat((times + again, known_times.index_select(0, pending_owners) + 1)),
    )


def _biases(sequences: Sequence[TokenSequence], vocab_size: int) -> Arrays:
    biased = [
        (row * vocab_size + token, bias)
        for row, s in enumerate(sequences)
        if s.sampling.logit_bias
        for token, bias in s.sampling.logit_bias.items()
    ]
    if not biased:
        return {}
    places, biases = zip(*biased, strict=True)
    return {"biased": np.array(places, dtype=np.int64), "biases": np.array(biases, dtype=np.float32)}


def _held_back(sequences: Sequence[TokenSequence], vocab_size: int) -> Arrays:
    """Below min_tokens, no token may be drawn that would end the output."""
    places = [
        row * vocab_size + token
        for row, s in enumerate(sequences)
        if s.stop.min_tokens and s.num_drawn < s.stop.min_tokens
        for token in s.stop.eos_token_ids | s.stop.stop_token_ids
    ]
    return {"held_back": np.array(places, dtype=np.int64)} if places else {}
