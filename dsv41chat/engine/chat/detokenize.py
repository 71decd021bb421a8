"""Ids to text, one id at a time, complete characters only. Source: spec chat_encoding, section 5."""

from __future__ import annotations

import codecs

from .tokenizer import ChatTokenizer


class Detokenizer:
    """Incremental UTF-8 over token bytes.

    The text of a sequence is the concatenation of what `feed` returned: bytes of an unfinished character wait for the next
    id. A control token (its spelling is the text) and the end of the stream drop them, so no half character is ever shown.
    Bytes that are no UTF-8 at all give U+FFFD. Nothing is stripped.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        data = self._tokenizer.token_bytes(id)
        if self._tokenizer.is_added(id):
            self._utf8.reset()
            return data.decode()
        return self._utf8.decode(data)

    def finish(self) -> str:
        """End of the stream: pending bytes are dropped and nothing more is shown (always the empty string)."""
        self._utf8.reset()
        return ""
