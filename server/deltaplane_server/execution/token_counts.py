"""Which tokens a sequence has, for penalties."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often each is in the output.

    It only ever reads the tokens that are new since it was last updated.
    """

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = array("q")
        self._output_counts = array("f")
        self._num_read = 0

    def update(self, tokens: Sequence[int], num_prompt: int) -> None:
        """tokens: prompt and output together; what was given before must be its beginning."""
        for position in range(self._num_read, len(tokens)):
            index = self._index.setdefault(tokens[position], len(self._ids))
            if index == len(self._ids):
                self._ids.append(tokens[position])
                self._output_counts.append(0.0)
            if position >= num_prompt:
                self._output_counts[index] += 1
        self._num_read = len(tokens)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[distinct tokens]."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """[distinct tokens]: how often each is in the output; 0 for those of the prompt alone."""
        return np.array(self._output_counts, dtype=np.float32)
