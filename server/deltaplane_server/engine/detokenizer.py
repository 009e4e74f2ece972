"""Token ids to text, one at a time, without ever splitting a character."""

from deltaplane_server.engine.api import TokenDecoder

_REPLACEMENT = "\ufffd"
_WINDOW = 32
_KEPT = 4
"""Tokens that a new window starts with: the up to three bytes of an incomplete character, and a token before
them that takes the place of the text's start, where some decoders drop a space."""


class Detokenizer:
    """Text of one output: what push() returned so far, and then tail(), is what decoding all tokens gives.

    Only a window of the last tokens is ever decoded, about once a token. Text is held back while later
    tokens may change it, which is so in two cases: an incomplete character at the end of the window, which
    decodes to one U+FFFD; and a run of byte-fallback tokens, which are decoded together and, where the run as
    a whole is not UTF-8, all turn into U+FFFD.
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""
        self._sent = 0
        self._in_run = False

    @property
    def in_byte_run(self) -> bool:
        """Whether the last token is a byte, so that tail() may be text already complete."""
        return self._in_run

    def push(self, token_id: int) -> str:
        """Takes in the next token and returns the text that is now certain, often empty."""
        if token_id in self._decoder.byte_fallback_ids:
            self._window.append(token_id)
            self._in_run = True
            return ""
        before = self._decode(self._window) if self._in_run else self._text
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == before and self._is_skipped(token_id):
            self._window.pop()
            return ""
        self._in_run = False
        self._text = text
        settled = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._sent : settled]
        self._sent = settled
        if len(self._window) >= _WINDOW:
            self._restart_window()
        return delta

    def tail(self) -> str:
        """The text that is held back, as it is if no token follows."""
        text = self._decode(self._window) if self._in_run else self._text
        return text[self._sent :]

    def _is_skipped(self, token_id: int) -> bool:
        """Whether a token is a special one that is left out, and not one without text of its own, such as a
        space that the start of a text drops."""
        return not self._decode([token_id]) and bool(
            self._decoder.decode([token_id], skip_special_tokens=False)
        )

    def _restart_window(self) -> None:
        held = self._text[self._sent :]
        window = self._window[-_KEPT:]
        text = self._decode(window)
        if text and text.endswith(held):
            self._window, self._text, self._sent = window, text, len(text) - len(held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
