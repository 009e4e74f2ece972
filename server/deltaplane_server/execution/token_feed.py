"""The input tokens of steps: those that the host knows, and those that the device alone knows yet.

A step that is launched before the one before it has been read goes on from tokens which that one draws. They
stay on the device, and a step's input picks them up there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deltaplane_server.scheduling.plan import ScheduledSequence
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence


class TokenFeed:
    """One block on the device, in its place for good, so that CUDA graphs may read it:

        drawn [max_sequences] | sent [T] | places [T]

    drawn: what the last step drew. sent: a step's T tokens, 0 where the host does not know one.
    places: where in the block each of the T tokens is: its own place in `sent`, or one in `drawn`.
    """

    def __init__(self, max_sequences: int, max_tokens: int, device: torch.device) -> None:
        """max_sequences: that a step draws tokens for. max_tokens: of a step."""
        with torch.inference_mode(False):
            self._block = torch.zeros(max_sequences + 2 * max_tokens, dtype=torch.int64, device=device)
        self.drawn = self._block[:max_sequences]
        self._drawn_places: dict[int, int] = {}

    def send(self, scheduled: Sequence[ScheduledSequence], num_rows: int) -> None:
        """Sends the tokens of a step, one copy on the current stream that the host does not wait for.

        num_rows: at least as many as the step has tokens; rows after these are token 0.
        Errors: KeyError for a token that the host does not know and the last step did not draw.
        """
        first = len(self.drawn)
        tokens: list[int] = []
        pending: list[tuple[int, int]] = []
        for part in scheduled:
            tokens += part.sequence.tokens[part.start : part.end]
            if part.end > len(part.sequence.tokens):
                pending.append((len(tokens), self._drawn_places[part.sequence.id]))
                tokens.append(0)
        block = torch.empty(2 * num_rows, dtype=torch.int64, pin_memory=self._block.device.type == "cuda")
        sent, places = block.numpy().reshape(2, num_rows)
        sent[: len(tokens)] = tokens
        sent[len(tokens) :] = 0
        places[:] = np.arange(first, first + num_rows)
        if pending:
            rows, drawn_places = zip(*pending, strict=True)
            places[list(rows)] = drawn_places
        self._block[first : first + 2 * num_rows].copy_(block, non_blocking=True)

    def tokens(self, num_rows: int, out: Tensor | None = None) -> Tensor:
        """[num_rows], int64: of the step that was sent last; in a graph, of the last before its replay."""
        first = len(self.drawn) + num_rows
        return torch.index_select(self._block[:first], 0, self._block[first : first + num_rows], out=out)

    def keep(self, sequences: Sequence[TokenSequence], tokens: Tensor | None) -> None:
        """Takes the tokens that a step draws, [len(sequences)], one for each; None where they are in `drawn`
        already. The step after it may go on from them."""
        if tokens is not None:
            self.drawn[: len(sequences)].copy_(tokens)
        self._drawn_places = {sequence.id: place for place, sequence in enumerate(sequences)}
