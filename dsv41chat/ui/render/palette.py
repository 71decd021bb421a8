"""The styles that lines are drawn with. The transcript fills them from the style sheet, so a theme changes them all."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rich.style import Style


@dataclass(frozen=True)
class Palette:
    """Each field is also a component class `transcript--<field>` of the transcript widget."""

    text: Style = Style()
    dim: Style = Style(dim=True)
    heading: Style = Style(bold=True)
    code: Style = Style()
    inline_code: Style = Style()
    link: Style = Style(underline=True)
    quote: Style = Style(italic=True)
    marker: Style = Style()
    frame: Style = Style(dim=True)
    thinking: Style = Style(dim=True)
    user: Style = Style(bold=True)
    model: Style = Style(bold=True)
    receipt: Style = Style(dim=True)
    notice: Style = Style()
    error: Style = Style(bold=True)
    match: Style = Style(reverse=True)
    current: Style = Style(reverse=True, bold=True)
    cursor: Style = Style(bold=True)

    @staticmethod
    def names() -> tuple[str, ...]:
        return tuple(one.name for one in fields(Palette))


@dataclass(frozen=True)
class RenderOptions:
    """width: cells for text. code_theme: a Pygments theme name. math: unicode or source."""

    width: int
    palette: Palette = field(default_factory=Palette)
    code_theme: str = "monokai"
    wrap_code: bool = False
    math: str = "unicode"


CODE_THEMES = {"dark": "monokai", "light": "xcode", "ansi-dark": "ansi_dark", "ansi-light": "ansi_light"}
