"""Token ids to text, one at a time, without ever splitting a character."""

from deltaplane_server.engine.api import TokenDecoder

_REPLACEMENT = "\ufffd"
_WINDOW = 32
_KEPT = 4
"""Tokens that a new window starts with: the up to three bytes of an incomplete character, and a token before
them that takes the place of the text's start, where some decoders drop a space."""


class Detokenizer:
    """Text of one output: what push() returned so far, and then tail(), is what decoding all tokens gives.

    While no text is held back, a token that is a piece of its own (see TokenDecoder.pieces) is looked up. For
    any other, a window of the last tokens is decoded, about once a token. Text is held back while later
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
        self._piece: int | None = None  # the last token with text, where it was looked up
        self._is_settled = False  # whether there is text, and none of it is held back

    @property
    def in_byte_run(self) -> bool:
        """Whether the last token is a byte, so that tail() may be text already complete."""
        return self._in_run

    def push(self, token_id: int) -> str:
        """Takes in the next token and returns the text that is now certain, often empty."""
        if self._is_settled:
            piece = self._decoder.pieces.get(token_id)
            if piece is not None:
                if piece:
                    self._piece = token_id
                return piece
            self._window_from_piece()
        delta = self._push_to_window(token_id)
        self._is_settled = not self._in_run and self._sent == len(self._text) > 0
        return delta

    def _push_to_window(self, token_id: int) -> str:
        if token_id in self._decoder.byte_fallback_ids:
            self._window.append(token_id)
            self._in_run = True
            return ""
        before = self._decode(self._window) if self._in_run else self._text
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == before and self._is_invisible(token_id):
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
        if self._is_settled:
            return ""
        text = self._decode(self._window) if self._in_run else self._text
        return text[self._sent :]

    def _is_invisible(self, token_id: int) -> bool:
        """Whether a token that has added no text never will, and the window does without it.

        At the start of a text that could also be a space, which some decoders drop there, and in a run of
        bytes it could be what ends the run: then only a special token is certain to be left out.
        """
        if self._decode([token_id]):
            return False
        if self._text and not self._in_run:
            return True
        return self._decoder.decode([token_id], skip_special_tokens=False) != ""

    def _window_from_piece(self) -> None:
        if self._piece is not None:
            self._window = [self._piece]
            self._text = self._decode(self._window)
            self._sent = len(self._text)
            self._piece = None

    def _restart_window(self) -> None:
        num_held = len(self._text) - self._sent
        self._window = self._window[-_KEPT:]
        self._text = self._decode(self._window)
        self._sent = len(self._text) - num_held

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
