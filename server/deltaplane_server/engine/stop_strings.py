"""Stop strings in streamed text: found across token borders, and never sent in part."""

from collections import deque
from functools import lru_cache


class _Automaton:
    """The Aho-Corasick automaton of a set of strings (Aho and Corasick 1975).

    A state stands for the longest end of the text that begins some string: children, where a further
    character leads; fallback, the longest shorter end; depth, the length of that end; match, the longest
    string that the text ends with, or None. State 0 is the empty end.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self._link()

    def next(self, state: int, character: str) -> int:
        while state and character not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(character, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            child = self.children[state].get(character)
            if child is None:
                child = self.children[state][character] = len(self.children)
                self.children.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = child
        self.match[state] = string

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.children[state].items():
                self.fallback[child] = self.next(self.fallback[state], character)
                if self.match[child] is None:
                    self.match[child] = self.match[self.fallback[child]]
                queue.append(child)


_automaton = lru_cache(maxsize=16)(_Automaton)


class StopMatcher:
    """Looks for stop strings in the text of one output, and holds back what may become one.

    The string that is complete first, character by character, ends the text, whatever the tokens; of those
    complete at the same character, the longest. What follows it is dropped.

    matched: the stop string that was found, or None.
    """

    def __init__(self, strings: tuple[str, ...], *, include_stop: bool = False) -> None:
        """strings: none of them empty."""
        self.matched: str | None = None
        self._automaton = _automaton(strings) if strings else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str:
        """Takes in new text and returns what may be sent.

        counts: whether a stop string that is complete in this text ends the output (see min_tokens).
        """
        if self._automaton is None:
            return text
        buffer = self._held + text
        state = self._state
        for end, character in enumerate(text, len(self._held) + 1):
            state = self._automaton.next(state, character)
            stop = self._automaton.match[state]
            if stop is not None and counts:
                self.matched = stop
                self._held = ""
                return buffer[: end if self._include_stop else end - len(stop)]
        self._state = state
        border = len(buffer) - self._automaton.depth[state]
        self._held = buffer[border:]
        return buffer[:border]

    def would_match(self, text: str) -> bool:
        """Whether push() of this text would find a stop string."""
        if self._automaton is None:
            return False
        state = self._state
        for character in text:
            state = self._automaton.next(state, character)
            if self._automaton.match[state] is not None:
                return True
        return False

    def flush(self) -> str:
        """What is still held back, when no text follows."""
        held, self._held = self._held, ""
        return held
