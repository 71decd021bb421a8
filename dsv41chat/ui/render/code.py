"""Colours for code, one list of styled runs per line."""

from __future__ import annotations

from functools import lru_cache

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from rich.style import Style
from rich.syntax import Syntax

HIGHLIGHT_CHARS = 40_000
ALIASES = {"py3": "python", "shell": "bash", "sh": "bash", "js": "javascript", "ts": "typescript", "metal": "cpp", "plain": "text"}


@lru_cache(maxsize=64)
def _lexer(name: str):
    if not name:
        return None
    try:
        return get_lexer_by_name(ALIASES.get(name.lower(), name.lower()), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def highlight(source: str, language: str, theme: str, base: Style) -> list[list[tuple[str, Style]]]:
    """The lines of `source` as (text, style) runs. Unknown languages and very long pieces stay in the base style."""
    lexer = _lexer(language)
    if lexer is None or len(source) > HIGHLIGHT_CHARS:
        return [[(line, base)] for line in source.split("\n")]
    colours = Syntax.get_theme(theme)
    styles: dict[object, Style] = {}
    lines: list[list[tuple[str, Style]]] = [[]]
    for token, text in lexer.get_tokens(source):
        style = styles.get(token)
        if style is None:
            found = colours.get_style_for_token(token)
            # The background of the block is the transcript's, never the colour theme's.
            style = styles[token] = base + Style(color=found.color, bold=found.bold or None, italic=found.italic or None)
        first, *others = text.split("\n")
        if first:
            lines[-1].append((first, style))
        for part in others:
            lines.append([(part, style)] if part else [])
    return lines[: source.count("\n") + 1]
