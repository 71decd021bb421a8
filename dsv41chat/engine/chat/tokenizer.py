"""Token ids of plain text and of control tokens, kept strictly apart.

The tokenizer that encodes text is built from the pack's `tokenizer.json` with an empty list of added tokens, so text that
spells a control token (`</think>`, `<｜Assistant｜>`) becomes ordinary ids. Control ids come from `marker` only.
Source: spec chat_encoding, sections 1 and 5.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import Cancelled, PackDamaged, PackIncomplete
from .markers import DEFENSIVE, EOS, check_family


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters in which byte-level BPE spells bytes.

    Printable Latin-1 characters stand for themselves; the other 68 bytes follow, in order, from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    table.update((chr(0x100 + k), byte) for k, byte in enumerate(b for b in range(256) if b not in printable))
    return table


BYTE_ALPHABET = _byte_alphabet()
PIECE = 1 << 14  # characters that `count_text` encodes at once: tens of milliseconds, in which no other thread of Python runs
_CUT_TOKENS = 16  # tokens that one cut between pieces may add: far more than was ever seen (less than one on average)


class ChatTokenizer:
    """One pack's tokenizer.

    sha256: of tokenizer.json. vocab_size: ids are 0 .. vocab_size-1 (an id in a gap has no bytes).
    added: the ids of the file's `added_tokens`; "is it a control token" is membership here, never a comparison of ids.
    """

    def __init__(self, data: bytes, source: str = "tokenizer.json"):
        """data: the bytes of a tokenizer.json; source: its name in messages. Raises PackDamaged."""
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._source = source
        try:
            spec = json.loads(data)
            vocab = spec["model"]["vocab"]
            self._markers: dict[str, int] = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
            spec["added_tokens"] = []
            self._text = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise PackDamaged(
                f"{source} is not a readable tokenizer: {error}", "copy the file again and compare its size with the source"
            ) from error
        missing = [byte for char, byte in BYTE_ALPHABET.items() if char not in vocab]
        if missing:
            # The BPE drops characters it has no piece for: text would vanish without a word.
            raise PackDamaged(f"{source} cannot spell {len(missing)} of 256 bytes (first: 0x{missing[0]:02x})")
        self.added = frozenset(self._markers.values())
        self._spelling: dict[int, str] = {id: piece for piece, id in vocab.items()}
        self._spelling.update((id, content) for content, id in self._markers.items())
        self._byte_ids = {byte: vocab[char] for char, byte in BYTE_ALPHABET.items()}
        self.vocab_size = max(self._spelling) + 1
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTokenizer:
        """Read a tokenizer.json. Raises PackIncomplete when it is absent, PackDamaged when it cannot be used."""
        path = Path(path)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise PackIncomplete(
                f"{path} is missing: without it text cannot be turned into tokens", "copy tokenizer.json from the model's own repository"
            ) from error
        except OSError as error:
            raise PackDamaged(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(data, str(path))

    def find_marker(self, spelling: str) -> int | None:
        """The id of the control token with this spelling, or None when this tokenizer has no such token."""
        return self._markers.get(spelling)

    def marker(self, spelling: str) -> int:
        """The id of the control token with this spelling; PackIncomplete when this tokenizer has no such token."""
        id = self._markers.get(spelling)
        if id is None:
            raise PackIncomplete(f"{self._source} has no control token {spelling!r}", "use the tokenizer.json that belongs to this model")
        return id

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every control token's spelling, in the order of the file."""
        return tuple(self._markers)

    def is_added(self, id: int) -> bool:
        return id in self.added

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; never a control id, whatever the text spells. Lone surrogates become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._text.encode(text, add_special_tokens=False).ids
        if self.added.isdisjoint(ids):
            return ids
        # A vocabulary may hold a control token's spelling as an ordinary piece (the release does for three of them, in
        # characters that byte-level text never contains). Should a piece match after all, spell it byte by byte.
        return [part for id in ids for part in ([id] if id not in self.added else (self._byte_ids[b] for b in self.token_bytes(id)))]

    def token_string(self, id: int) -> str | None:
        """The vocabulary string of an id (byte alphabet, or a control token's spelling); None for an id without a token."""
        return self._spelling.get(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes an id stands for (a control token: UTF-8 of its spelling). An id without a token has none."""
        if not 0 <= id < self.vocab_size:
            return b""
        data = self._bytes[id]
        if data is None:
            data = self._bytes[id] = self._spell(id)
        return data

    def _spell(self, id: int) -> bytes:
        piece = self._spelling.get(id, "")
        if id in self.added:
            return piece.encode()
        try:
            return bytes(BYTE_ALPHABET[char] for char in piece)
        except KeyError:  # an ordinary entry with a literal spelling
            return piece.encode()


def count_text(tokenizer: ChatTokenizer, text: str, enough: int | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
    """The number of ids of a text, encoded in pieces of PIECE characters: other threads and signal handlers run between them.

    Exact for one piece; each cut more can make it a token or so larger than `len(encode_text(text))`.
    enough: end as soon as the text certainly has more ids than this, and return a number of ids that it has at least.
    stopped: asked before each piece; true raises Cancelled.
    """
    count = 0
    for cuts, start in enumerate(range(0, len(text), PIECE)):
        if stopped():
            raise Cancelled("The text was not counted to its end.")
        count += len(tokenizer.encode_text(text[start : start + PIECE]))
        least = count - _CUT_TOKENS * (cuts + 1)
        if enough is not None and least > enough:
            return least
    return count


def stop_ids(tokenizer: ChatTokenizer, family: str) -> tuple[int, frozenset[int]]:
    """(the id that ends an answer, ids that must not occur in one and end it too).

    Of the second group only those that this tokenizer has. None of them is fed to the parser or shown.
    """
    defensive = (tokenizer.find_marker(spelling) for spelling in DEFENSIVE[check_family(family)])
    return tokenizer.marker(EOS), frozenset(id for id in defensive if id is not None)
