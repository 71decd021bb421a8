"""The page for somebody without a build, and questions that a digit answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv41chat.engine.errors import BackendMissing
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, make_app, say, screen_text, shows, until


async def test_the_page_from_the_build_menu(tmp_path, monkeypatch):
    app = make_app(tmp_path, Script())
    app.host.machine = lambda: "Machine: 128 GB memory, 96 GB usable by the GPU, 1.4 TB of disk free."
    app.host.published = lambda name, recipe: f"{name} {recipe} (88 GB, tight)" if recipe == "mixed-2.4" else ""
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("f2")
        await until(lambda: "w first steps" in screen_text(app))
        await pilot.press("w")
        await until(lambda: screen_text(app).count("mixed-2.4 (88 GB, tight)") == 2)
        assert "native" not in await shows(app, "Welcome. First steps", "Machine: 128 GB memory")
        await pilot.press("2")
        await shows(app, "--recipe mixed-2.4", "Nothing is ever downloaded.")
        await pilot.press("escape")
        await until(lambda: "--recipe mixed-2.4" not in screen_text(app))
        chat_of(app).action_welcome()
        await until(lambda: "Look around first" in screen_text(app))
        await pilot.press("1")
        await until(lambda: "Folder of a build" in screen_text(app))
        await pilot.press("escape", "escape")


async def test_without_a_back_end_it_is_the_first_page(tmp_path):
    app = make_app(tmp_path, Script())
    app.begin = replace(app.begin, backend_missing="No MLX back end is installed. Run: pip install 'dsv41chat[cpu]'")

    def missing() -> str:
        raise BackendMissing("none")

    app.host.machine = missing
    async with app.run_test(size=(100, 30)) as pilot:
        await until(lambda: "Reading, searching and exporting work without one." in screen_text(app))
        await pilot.press("3")
        await until(lambda: "Welcome. First steps" not in screen_text(app))
        await shows(app, "pip install")


def test_the_machine_and_what_fits_it(tmp_path):
    app = make_app(tmp_path, Script())
    assert app.host.machine().startswith("Machine: ") and "memory" in app.host.machine() and "of disk free" in app.host.machine()
    found = app.host.published("V4-Flash", "mixed-2.4")
    assert found == "" or found.startswith("V4-Flash mixed-2.4 (88.5 GB")
    app.host.close()


async def test_a_digit_chooses(tmp_path):
    two = "```\none = 1\n```\ntext\n```\ntwo = 2\n```\n"
    app = make_app(tmp_path, Script(two))
    copied = []
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        chat.copy_text = lambda text, what: copied.append(text)
        await say(pilot, app, "hello")
        await pilot.press("tab", "y")
        await until(lambda: "Which code block?" in screen_text(app))
        await pilot.press("9", "2")
        await until(lambda: bool(copied))
        assert copied == ["two = 2\n"]


async def test_details_name_the_memory(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 40)) as pilot:
        await say(pilot, app, "hello")
        await pilot.press("f4")
        await until(lambda: "2.0 MB of arrays now, 3.0 MB at their peak" in screen_text(app))
        await pilot.press("escape")


async def test_an_export_comes_back_by_the_palette(tmp_path, monkeypatch):
    from dsv41chat.ui.export import export

    app = make_app(tmp_path, Script("the answer"))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        first = chat.conversation.id
        (tmp_path / "chat.json").write_text(export([chat.conversation], app.store, "json"))
        (tmp_path / "bad.json").write_text("{}")
        told = []
        monkeypatch.setattr(chat, "tell", lambda text, severity="information": told.append(text))
        for name, said in (("bad.json", "no conversation that dsv41chat exported"), ("chat.json", "1 came in as copies, their ids were taken")):
            chat.action_import()
            await until(lambda: "JSON export to import" in screen_text(app) and len(app.screen.query("Input")) == 1)
            app.screen.query_one("Input").value = str(tmp_path / name)
            await pilot.press("enter")
            await until(lambda said=said: said in " ".join(told))
        await until(lambda: chat.conversation.id != first)
        assert [m.text for m in app.store.tree(chat.conversation.id)] == ["hello", "the answer"]
        assert len(app.store.tree(first)) == 2


@pytest.mark.parametrize("there_at_the_start", [False, True])
async def test_a_default_build_that_is_not_there_is_told(tmp_path, there_at_the_start):
    """At the start, or with the first answer when it went away since."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    app = make_app(tmp_path, Script(answer="answer"))
    app.store.builds.use(folder)
    if there_at_the_start:
        # Nothing is loaded then, so that the answer looks for its build.
        app.begin = replace(app.begin, backend_missing="No back end.")
    else:
        folder.rename(tmp_path / "unplugged")
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        if there_at_the_start:
            await until(lambda: app.screen is not chat)
            await pilot.press("escape")
            folder.rename(tmp_path / "unplugged")
            await say(pilot, app, "hello")
            await until(lambda: any("other is not where it was" in note.message for note in app._notifications))
        else:
            await shows(app, "other is not where it was; nano answers.")
            await say(pilot, app, "hello")
            assert not app._notifications, "once"
