"""Themes: readable in every one of our own, meaning without colour, the terminal's background asked safely."""

from __future__ import annotations

import pytest
from pygments.styles import get_style_by_name
from pygments.token import Token
from textual.color import Color

from dsv41chat.ui.background import ask_terminal, is_light, parse_answer
from dsv41chat.ui.render.palette import CODE_THEMES, Palette
from dsv41chat.ui.screens.dialogs import AskScreen
from dsv41chat.ui.themes import OWN
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, make_app, say, shows, until

TEXT = [name for name in Palette.names() if name not in ("match", "current", "frame")]


def contrast(one: Color, two: Color) -> float:
    def luminance(color: Color) -> float:
        parts = [part / 255 for part in color.rgb]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["dark", "light", "high-contrast"])
async def test_text_reaches_contrast(tmp_path, theme):
    app = make_app(tmp_path, Script(answer="# a\n\n`b` [c](https://d.e)\n\n> f"), config=f'[ui]\ntheme = "{theme}"\n')
    async with app.run_test(size=(80, 24)) as pilot:
        await say(pilot, app, "hello")
        assert app.theme == theme
        transcript = chat_of(app).transcript
        weak = {}
        for name in TEXT:
            style = transcript.get_component_styles(f"transcript--{name}")
            background = transcript.background_colors[1]
            ratio = contrast(background + style.color, background)
            if ratio < 4.5:
                weak[name] = round(ratio, 2)
        for name in ("header", "status", "keys", "badge", "queue", "above", "composer"):
            widget = chat_of(app).query_one(f"#{name}")
            _, background, color, _ = widget.colors
            ratio = contrast(background + color, background)
            if ratio < 4.5:
                weak[name] = round(ratio, 2)
        composer = chat_of(app).composer
        hint = composer.get_component_styles("text-area--placeholder").color
        background = composer.background_colors[1]
        if contrast(background + hint, background) < 4.5:
            weak["placeholder"] = round(contrast(background + hint, background), 2)
        assert weak == {}


@pytest.mark.parametrize("theme", OWN, ids=lambda theme: theme.name)
def test_the_colours_of_code_reach_contrast(theme):
    background = Color.parse(theme.background)
    style = get_style_by_name(CODE_THEMES["dark" if theme.dark else "light"])
    weak = {}
    for token, colours in style:
        # Errors and the output of other programs are not what highlighted code consists of.
        if colours["color"] and token not in Token.Error and token not in Token.Generic:
            ratio = contrast(Color.parse(f"#{colours['color']}"), background)
            if ratio < 4.5:
                weak[str(token)] = round(ratio, 2)
    assert weak == {}


@pytest.mark.parametrize("theme", ["ansi", "nord"])
async def test_other_themes_draw_the_same_text(tmp_path, theme):
    app = make_app(tmp_path, Script(answer="**b** `c`\n\n```python\nx = 1\n```\n"), config=f'[ui]\ntheme = "{theme}"\n')
    async with app.run_test(size=(80, 24)) as pilot:
        await say(pilot, app, "hello")
        await shows(app, "x = 1")
        assert app.theme in ("ansi-dark", "nord")


async def test_a_theme_from_the_palette_is_kept(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)):
        await until(lambda: not chat_of(app).starting)
        app.theme = "light"
        await until(lambda: 'theme = "light"' in (tmp_path / "config.toml").read_text())


@pytest.mark.parametrize(("row", "wanted"), [("ui.theme", "tokyo-night"), ("engine.routes", "compiled")])
async def test_the_settings_screen_offers_what_there_is(tmp_path, row, wanted):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("f8", *["tab"] * (1 if row.startswith("ui") else 2))
        await until(lambda: row in [one.name for one in app.screen._rows])
        await pilot.press(*["down"] * [one.name for one in app.screen._rows].index(row), "enter")
        await until(lambda: isinstance(app.screen, AskScreen))
        await shows(app, "> auto")
        await pilot.press("end")
        await shows(app, wanted)
        await pilot.press("enter")
        await until(lambda: app.settings.get(row) == wanted)
        assert row != "ui.theme" or app.theme == wanted
        before = (tmp_path / "config.toml").read_text()
        assert f'"{wanted}"' in before
        assert not chat.change_key(row, "nosuch") and (tmp_path / "config.toml").read_text() == before and app.settings.get(row) == wanted


async def test_a_theme_of_the_command_line_stays_when_another_setting_changes(tmp_path):
    app = make_app(tmp_path, Script(), AppStart(theme="nord"), config='[ui]\ntheme = "light"\n')
    async with app.run_test(size=(80, 24)):
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        assert chat.change_key("ui.wrap_code", True) and app.theme == "nord"
        assert chat.change_key("ui.theme", "dark") and app.theme == "dark"


def test_the_answer_of_the_terminal_is_told_from_keys():
    assert parse_answer(b"a\x1b]11;rgb:ffff/ffff/ffff\x1b\\b") == (True, b"ab")
    assert parse_answer(b"\x1b]11;rgb:1e/1e/2e\x07") == (False, b"")
    assert parse_answer(b"typed") == (None, b"typed")
    assert is_light(1, 1, 1) and not is_light(0.1, 0.1, 0.3)
    assert ask_terminal() == (None, "")
