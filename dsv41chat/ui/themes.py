"""Our own themes. Every text colour reaches a contrast of 4.5:1 on the background (tests/ui/test_themes.py)."""

from __future__ import annotations

from textual.theme import BUILTIN_THEMES, Theme

from dsv41chat.settings import OWN_THEMES, ConfigError, near

DARK = Theme(
    name="dark", dark=True, primary="#6cb6ff", secondary="#7ee0c8", accent="#ffb454", foreground="#e2e2e2", background="#121212",
    surface="#1c1c1c", panel="#262626", success="#7ddf7d", warning="#ffd166", error="#ff8f8f",
    variables={"text-muted": "#a8a8a8", "border": "#6cb6ff", "border-blurred": "#6a6a6a"},
)  # fmt: skip
LIGHT = Theme(
    name="light", dark=False, primary="#00539c", secondary="#006455", accent="#8a4400", foreground="#1a1a1a", background="#fdfdfd",
    surface="#f2f2f2", panel="#e6e6e6", success="#1b661b", warning="#734d00", error="#a8001c",
    variables={"text-muted": "#4f4f4f", "border": "#00539c", "border-blurred": "#8a8a8a"},
)  # fmt: skip
HIGH_CONTRAST = Theme(
    name="high-contrast", dark=True, primary="#66ccff", secondary="#ffff66", accent="#ffcc00", foreground="#ffffff", background="#000000",
    surface="#000000", panel="#1a1a1a", success="#66ff66", warning="#ffcc00", error="#ff9a9a",
    variables={"text-muted": "#e0e0e0", "border": "#ffffff", "border-blurred": "#b0b0b0"},
)  # fmt: skip
OWN = (DARK, LIGHT, HIGH_CONTRAST)


def names() -> tuple[str, ...]:
    """Every value that `ui.theme` and `--theme` may have, our own first."""
    return (*OWN_THEMES, *sorted(name for name in BUILTIN_THEMES if name not in OWN_THEMES))


def check(name: str) -> None:
    """Raises ConfigError where `name` may not become `ui.theme`."""
    if name not in names():
        raise ConfigError(f"ui.theme must be one of {', '.join(names())}, not {name!r}{near(name, names())}.", hint="dsv41chat config show")
