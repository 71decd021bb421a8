"""Makes any text safe to show: a terminal must never receive a control character or an escape sequence of the text itself."""

from __future__ import annotations

import json
from typing import Any

TAB_CELLS = 4

_REPLACEMENTS: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20)}
_REPLACEMENTS[0x7F] = "\u2421"
# C1 controls have no pictures of their own; some terminals still obey them.
_REPLACEMENTS.update({code: "\ufffd" for code in range(0x80, 0xA0)})
# Direction overrides reorder what stands around them, also outside the text.
_REPLACEMENTS.update({code: "\ufffd" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))})
# A lone surrogate cannot be written as UTF-8 at all.
_SURROGATES = {code: "\ufffd" for code in range(0xD800, 0xE000)}
_REPLACEMENTS.update(_SURROGATES)
_REPLACEMENTS.update({0x2028: "\n", 0x2029: "\n"})
_REPLACEMENTS.pop(0x0A)

# JSON escapes what is below a space itself.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*_REPLACEMENTS, 0x85) if code >= 0x7F}

# As many characters as before: places in a text that is edited must stay.
_IN_PLACE = {code: symbol for code, symbol in _REPLACEMENTS.items() if code != 0x09} | {0x2028: "\u2424", 0x2029: "\u2424"}

_ONE_LINE = _REPLACEMENTS | {0x0A: "\u2424", 0x09: " ", 0x2028: " ", 0x2029: " "}


def visible(text: str) -> str:
    """Returns `text` with every control character as a symbol. Line feeds stay, CR LF becomes LF, a tab becomes spaces."""
    if text.isascii() and text.isprintable():
        return text
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    if "\t" in text:
        text = text.expandtabs(TAB_CELLS)
    return text.translate(_REPLACEMENTS)


def visible_line(text: str) -> str:
    """The same for a place that has one line only (titles, names, errors): line feeds become symbols too."""
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_ONE_LINE)


def in_place(text: str) -> str:
    """One line of a text that is being edited: the same number of characters, tabs as they are."""
    return text if text.isascii() and text.isprintable() else text.translate(_IN_PLACE)


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON in which nothing can act on a terminal or end a line: the same data, such characters as escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_ESCAPES)


def sendable(text: str) -> str:
    """Cleans pasted or typed text for the composer: one kind of newline, no NUL, no escape. Other characters stay as they are."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "").replace("\x1b", "")
    return text.translate(_SURROGATES)


def not_unicode(text: str) -> bool:
    """Whether the text holds half surrogates, as which bytes that are not UTF-8 are read."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
