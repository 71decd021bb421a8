"""What each setting does, from the config file to where it counts. `test_effects.py` holds the list that none may be missing from."""

from __future__ import annotations

import shutil

import pytest

from dsv41chat.nano import embedded_pack
from dsv41chat.store import Store
from tests.ui.chats import Chat
from tests.ui.fakes import FakeEngine, Script
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, until


@pytest.fixture
def configured(program, tmp_path):
    """Runs the program with a config file of this text."""

    def run(text: str, *argv: str, **options):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return program("--config", str(path), *argv, **options)

    return run


def said_to(script: Script) -> bytes:
    """The text of the newest prompt."""
    return bytes(id for id in script.sessions[-1].calls[-1].prompt.ids if id < 256)


# chat --------------------------------------------------------------------------------------------------------------------


def test_sampling_settings_reach_the_engine(configured):
    script = Script()
    configured(
        """
        [chat]
        temperature = 0.7
        top_k = 40
        top_p = 0.9
        min_p = 0.1
        presence_penalty = 0.5
        frequency_penalty = -0.25
        max_tokens = 3
        loop_stop = false
        [engine]
        draft = "off"
        """, "--json", "hi", script=script,
    )  # fmt: skip
    call = script.sessions[0].calls[0]
    s = call.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty) == (0.7, 40, 0.9, 0.1, 0.5, -0.25)
    assert (call.max_tokens, call.loop_stop, call.draft) == (3, False, "off")


def test_system_and_effort_of_new_conversations(configured):
    script = Script("a", thinking="hm")
    first = configured('[chat]\nsystem = "Be brief."\neffort = "off"\n', "--json", "hi", script=script).object
    assert b"Be brief." in said_to(script) and first["thinking"] == ""
    again = configured('[chat]\nsystem = "Another."\neffort = "high"\n', "--json", "-c", "more", script=script).object
    assert b"Be brief." in said_to(script) and b"Another." not in said_to(script) and again["thinking"] == "", "only of new ones"


def test_keep_reasoning_shows_the_model_its_earlier_thoughts(configured):
    script = Script("a", thinking="an earlier thought")
    for keep in ("false", "true"):
        configured("", "--json", "hi", script=script)
        configured(f"[chat]\nkeep_reasoning = {keep}\n", "--json", "-c", "more", script=script)
        assert (b"an earlier thought" in said_to(script)) is (keep == "true")


def test_v4_effort_chooses_the_texts_of_a_v4_build(configured, monkeypatch):
    monkeypatch.setattr(FakeEngine, "family", "v4")
    prompts = {}
    for profile in ("auto", "official", "preview"):
        script = Script()
        configured(f'[chat]\nv4_effort = "{profile}"\neffort = "high"\n', "--json", "hi", script=script)
        prompts[profile] = said_to(script)
    assert prompts["official"] != prompts["preview"] and prompts["auto"] in (prompts["official"], prompts["preview"])


def test_keep_deleted_days(configured, program):
    key = program("--json", "hi").object["conversation"]
    program("conversations", "delete", key, "--yes")
    configured("", "--json", "other")
    assert [row["id"] for row in program("conversations", "list", "--archived", "--json").object] == [key]
    configured("[chat]\nkeep_deleted_days = 0\n", "--json", "other")
    assert program("conversations", "list", "--archived", "--json").object == []


# engine, engram, cache ---------------------------------------------------------------------------------------------------


def test_engine_settings_reach_the_engine(configured):
    script = Script()
    configured(
        """
        [engine]
        context = 700
        exact = "fast"
        engram = "resident"
        cache_quant = false
        linear_input_fp8 = true
        qat_sim = true
        memory_margin = "3 GB"
        [engram]
        scales = "mapped"
        access = "pread"
        path = "pool"
        cache_budget = "5 MB"
        row_cache = 77
        """, "--json", "hi", script=script,
    )  # fmt: skip
    (opened,) = script.opened
    tables = opened.pop("engram")
    assert (tables.mode, tables.scales, tables.access, tables.path, tables.cache_budget, tables.row_cache) == (
        "resident", "mapped", "pread", "pool", 5_000_000, 77,
    )  # fmt: skip
    assert opened.items() >= {
        "context": 700, "exact": "fast", "cache_quant": False, "linear_input_fp8": True, "qat_sim": True, "margin": 3_000_000_000,
    }.items()  # fmt: skip


def test_engine_settings_count_in_the_engine(configured):
    """The same with the real one. What a memory_margin decides: tests/engine/test_admission.py."""
    info = configured('[engine]\ncontext = 700\nmemory_margin = "3 GB"\n', "models", "info", "nano", "--json", real=True).object
    assert info["admitted_context"] == 700 and info["memory"]["margin"] == 3 * 10**9 and "margin 3.0 GB" in info["memory"]["words"]
    turn = configured("[engine]\ncontext = 700\n[chat]\nmax_tokens = 2\n", "--json", "hi", real=True).object
    assert turn["usage"]["context_limit"] == 700


def test_routes(configured):
    """The route that was asked for is the one that computes, and `doctor routes` names it; the routes: tests/engine/kernels."""
    for routes in ("auto", "stock"):
        (line, *_) = configured(f'[engine]\nroutes = "{routes}"\n', "doctor", "routes", "--model", "nano", "--json", real=True).object
        assert line["build"] == "nano" and line["name"] == "routes" and f"engine.routes = {routes}" in line["text"]
    refused = configured('[engine]\nroutes = "nowhere"\n', "--json", "hi", real=True)
    assert refused.code == 3 and "line 2: engine.routes must be one of auto, stock, blas, metal, cuda, compiled, not" in refused.object["message"]


def test_model_and_folders(configured, tmp_path):
    """engine.model answers when nobody names a build; the sub-folders of engine.model_dirs are builds."""
    shutil.copytree(embedded_pack(), tmp_path / "packs" / "second")
    dirs = f'[engine]\nmodel_dirs = ["{tmp_path / "packs"}"]\n'
    assert "second" in configured(dirs, "models", "list").out
    assert configured(dirs, "--json", "hi").object["build"]["name"] == "nano"
    assert configured(dirs + 'model = "second"\n', "--json", "hi").object["build"]["name"] == "second"


@pytest.mark.usefixtures("shared_weights")
def test_cache_settings(tmp_path):
    """Where states are kept, and which are too short. (enabled, budget and strict: tests/ui/test_states.py.)"""
    long = "Please describe the lighthouse at the end of the long pier in the evening light. " * 3
    kept = lambda folder: sorted(path.suffix for path in folder.rglob("*") if path.is_file() and path.parent.name != folder.name)
    cases = {"too short": ({"cache.min_tokens": 100_000}, False), "elsewhere": ({"cache.dir": str(tmp_path / "elsewhere")}, True)}
    for name, (flags, any_kept) in cases.items():
        chat = Chat(tmp_path / name, flags=flags)
        chat.host.states = type(chat.host.states).of(chat.settings)
        chat.say(long)
        folder = chat.folder
        chat.close()
        assert bool(kept(folder)) is any_kept, name
        assert (folder == tmp_path / "elsewhere") is (name == "elsewhere")


# ui ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "high-contrast", "ansi", "nord"])
async def test_theme(tmp_path, theme):
    app = make_app(tmp_path, config=f'[ui]\ntheme = "{theme}"\n')
    async with app.run_test(size=(80, 24)):
        await until(lambda: not chat_of(app).starting)
        assert app.theme == {"ansi": "ansi-dark"}.get(theme, theme)


def test_a_theme_that_is_not_there_is_an_error_with_its_place(configured, tmp_path, monkeypatch):
    result = configured('[chat]\n\n[ui]\ntheme = "lihgt"\n', terminal=True)
    assert result.code == 3 and "config.toml, line 4: ui.theme names no theme: 'lihgt' (did you mean light?)" in result.err
    assert f"Try: dsv41chat config unset ui.theme --config {tmp_path / 'config.toml'}\n" in result.err
    doctor = configured('[ui]\ntheme = "lihgt"\n', "doctor", "--json")
    line = next(line for line in doctor.object if line["name"] == "settings")
    assert doctor.code == 1 and line["verdict"] == "fail" and "line 2: ui.theme names no theme" in line["text"] and "config unset" in line["remedy"]
    monkeypatch.setenv("DSV41CHAT_UI_THEME", "nope")
    result = configured("", terminal=True)
    assert result.code == 3 and "DSV41CHAT_UI_THEME: ui.theme names no theme: 'nope'." in result.err
    assert "Try: unset DSV41CHAT_UI_THEME\n" in result.err
    assert configured("", "--json", "hi").code == 0, "a script draws nothing"


def test_a_theme_that_is_not_there_is_among_all_that_is_wrong(configured, tmp_path):
    both, wrong = (
        '[ui]\ntheme = "nosuch"\nmouse = 3\n[foo]\n',
        ("line 2: ui.theme names no theme: 'nosuch'", "line 3: ui.mouse must be", "section [foo]"),
    )
    for words in ([], ["config", "show"], ["doctor"]):
        result = configured(both, *words, terminal=True)
        assert result.code == (1 if words == ["doctor"] else 3) and all(text in result.out + result.err for text in wrong), words
    said = configured(both, "config", "set", "ui.mouse", "true").err
    assert "still wrong in it: line 2: ui.theme names no theme" in said and "still wrong in it: unknown section [foo]" in said
    only = '[ui]\ntheme = "nosuch"\nbogus = 1\n'
    shown = configured(only, "config", "show")
    assert shown.code == 0 and "line 2: ui.theme names no theme: 'nosuch'" in shown.err
    doctor = configured(only, "doctor")
    assert doctor.code == 1 and "line 2: ui.theme" in doctor.out and "line 3: unknown key ui.bogus" in doctor.out
    assert configured(only, terminal=True).err.count("names no theme") == 1
    script = configured(only, "--headless", "hi")
    assert script.code == 0 and "names no theme" not in script.err, "a script draws nothing"
    dark = configured(only, "config", "set", "ui.theme", "dark").err
    assert "still wrong in it: line 3: unknown key ui.bogus" in dark and "names no theme" not in dark


def test_a_theme_of_the_command_line_that_is_not_there_is_an_error_everywhere(configured):
    for words in (["--headless", "hi"], ["hi"], ["--plain"]):
        result = configured("", "--theme", "lihgt", *words)
        assert result.code == 2 and "There is no theme 'lihgt' (did you mean light?)" in result.err
    assert "belongs to the full screen" in configured("", "--theme", "light", "--headless", "hi").err


def test_the_themes_that_are_known_without_textual_are_there():
    from dsv41chat.settings import KNOWN_THEMES, OWN_THEMES
    from dsv41chat.ui.themes import OWN, names

    assert set(KNOWN_THEMES) < set(names()) and {"auto", "ansi", *(theme.name for theme in OWN)} == set(OWN_THEMES)


async def test_mouse(tmp_path):
    for setting in ("true", "false"):
        assert make_app(tmp_path, config=f"[ui]\nmouse = {setting}\n").mouse_on is (setting == "true")


@pytest.mark.parametrize(("sidebar", "width", "shown"), [("show", 100, True), ("hide", 130, False), ("auto", 100, False), ("auto", 130, True)])
async def test_sidebar(tmp_path, sidebar, width, shown):
    app = make_app(tmp_path, config=f'[ui]\nsidebar = "{sidebar}"\n')
    async with app.run_test(size=(width, 24)):
        await until(lambda: not chat_of(app).starting)
        await drawn(app)
        assert chat_of(app).query_one("Sidebar").display is shown


@pytest.mark.parametrize(("thinking", "line", "text"), [("fold", True, False), ("show", True, True), ("hide", False, False)])
async def test_thinking(tmp_path, thinking, line, text):
    app = make_app(tmp_path, Script("the answer", thinking="a thought of mine"), config=f'[ui]\nthinking = "{thinking}"\n')
    async with app.run_test(size=(80, 24)) as pilot:
        await say(pilot, app, "hello")
        await shows(app, "the answer", "prefilled")
        shown = await drawn(app)
        assert ("▸ thinking" in shown or "▾ thinking" in shown) is line and ("a thought of mine" in shown) is text


@pytest.mark.parametrize(("math", "shown"), [("unicode", "x² + α"), ("source", r"$x^2 + \alpha$")])
async def test_math(tmp_path, math, shown):
    app = make_app(tmp_path, Script(r"So $x^2 + \alpha$ it is."), config=f'[ui]\nmath = "{math}"\n')
    async with app.run_test(size=(80, 24)) as pilot:
        await say(pilot, app, "hello")
        await until(lambda: f"So {shown} it is." in screen_text(app))


@pytest.mark.parametrize("wrap", ["true", "false"])
async def test_wrap_code(tmp_path, wrap):
    app = make_app(tmp_path, Script("```\n" + "a" * 90 + "END\n```\n"), config=f"[ui]\nwrap_code = {wrap}\n")
    async with app.run_test(size=(80, 24)) as pilot:
        await say(pilot, app, "hello")
        await shows(app, "aaaa", "prefilled")
        assert ("END" in await drawn(app)) is (wrap == "true")


@pytest.mark.parametrize("confirm", ["true", "false"])
async def test_confirm_quit(tmp_path, confirm):
    app = make_app(tmp_path, Script("word " * 400, delay_s=0.01), config=f"[ui]\nconfirm_quit = {confirm}\n")
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and bool(chat._answer.text))
        await pilot.press("ctrl+q")
        if confirm == "true":
            await until(lambda: "An answer is running." in screen_text(app))
            assert not app.leaving
            await pilot.press("enter")
        await until(lambda: app.leaving and app.return_code is not None)
    assert app.return_code == 0


async def test_reduced_motion(tmp_path):
    for setting, level in (("true", "none"), ("false", "full")):
        app = make_app(tmp_path, config=f"[ui]\nreduced_motion = {setting}\n")
        async with app.run_test(size=(80, 24)):
            await until(lambda app=app: not chat_of(app).starting)
            assert app.animation_level == level and chat_of(app).composer.cursor_blink is (setting == "false")


@pytest.mark.parametrize("burst", ["true", "false"])
async def test_burst_paste(tmp_path, burst):
    """Keys without any pause between them, Enter last: a paste that must not send, or somebody's script."""
    from textual import events

    app = make_app(tmp_path, config=f"[ui]\nburst_paste = {burst}\n")
    async with app.run_test(size=(80, 24)):
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching and not chat.starting)
        now = chat.composer._last_key + 1.0
        for number, key in enumerate([*"abcdef", "enter"]):
            event = events.Key(key, key if len(key) == 1 else "\r")
            event.time = now + number * 0.001  # however busy this process is
            app.post_message(event)
        if burst == "true":
            await until(lambda: chat.composer.text == "abcdef\n")
        else:
            await ended(chat)
            assert app.store.path_to(chat.leaf_id)[0].text == "abcdef"


# log ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "content", "traceback", "text"),
    [("error", "true", True, False), ("debug", "false", True, False), ("debug", "true", True, True), ("info", "true", True, False)],
)
def test_log_level_and_content(configured, program, level, content, traceback, text):
    config = f'[log]\nlevel = "{level}"\ncontent = {content}\n'
    configured(config, "--json", "a secret question", script=Script("a secret answer"))
    configured(config, "--json", "another", script=Script(error=ValueError("x")))
    log = (program.data / "log" / "dsv41chat.log").read_text()
    assert ("Traceback" in log) is traceback
    assert ("a secret question" in log) is ("a secret answer" in log) is text
    assert (" INFO " in log or " DEBUG " in log) <= (level != "error")


# the effort that nobody chose --------------------------------------------------------------------------------------------


async def test_the_source_of_an_effort_that_nobody_chose_is_not_the_conversation(tmp_path):
    app = make_app(tmp_path, Script("a"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        assert chat.option_values()["effort"] == ("high", "default")
        chat.change_option("effort", "low")
        assert chat.option_values()["effort"] == ("low", "conversation")
        chat.change_option("effort", None)
        assert chat.option_values()["effort"] == ("high", "default")


def test_what_a_conversation_began_with_outlives_the_file(configured, program):
    configured('[chat]\neffort = "low"\n', "--json", "hi")
    assert configured('[chat]\neffort = "max"\n', "--json", "-c", "more").object["params"]["effort"] == "low"
    with Store.open(program.data, readonly=True) as store:
        assert "effort" not in store.last_conversation().settings
    configured("", "--json", "--effort", "off", "hi")
    with Store.open(program.data, readonly=True) as store:
        assert store.last_conversation().settings["effort"] == "off"
