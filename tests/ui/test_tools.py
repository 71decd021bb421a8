"""The tools of the chat screen: branches, copy, find, search, settings, builds, export, commands, files, hard cases."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv41chat.engine.errors import ContextFull, DoesNotFit, RouteUnavailable
from dsv41chat.store import Store, StoreFull
from dsv41chat.store.receipts import Receipts
from dsv41chat.ui.keymap import CHAT, COMPOSER, GLOBAL, KEYS, TRANSCRIPT, clashes, display
from dsv41chat.ui.screens.builds import BuildsScreen
from dsv41chat.ui.screens.conversations import ConversationsScreen
from dsv41chat.ui.screens.dialogs import AskScreen
from dsv41chat.ui.screens.export import file_name, free_path
from dsv41chat.ui.screens.search import SearchScreen
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, until

CODE = "First:\n\n```python\nprint(1)\n```\n\nthen\n\n```sh\nls\n```\n"


async def test_edit_makes_a_branch_and_both_stay_reachable(tmp_path):
    script = Script(answer="one")
    app = make_app(tmp_path, script)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        for number in range(5):
            script.answer = f"answer {number}"
            await say(pilot, app, f"question {number}")
        await pilot.press("tab", "g", "e")
        await shows(app, "editing message 1")
        await until(lambda: chat.composer.text == "question 0" and chat.focused is chat.composer)
        await pilot.press("escape")
        await until(lambda: chat.composer.text == "" and chat.editing is None)
        await pilot.press("tab", "g", "e")
        await until(lambda: chat.editing is not None and chat.focused is chat.composer)
        script.answer = "answer new"
        chat._finish = None
        await pilot.press(*" changed", "enter")
        await ended(chat)
        assert "answer 0" not in await shows(app, "2/2", "answer new")
        await pilot.press("tab", "g", "left_square_bracket")
        await until(lambda: "answer 4" in screen_text(app) or "answer 0" in screen_text(app))
        await until(lambda: chat.transcript.entries[0].branch == "1/2" and len([e for e in chat.transcript.entries if e.message]) == 10)
        assert app.store.conversation(chat.conversation.id).leaf_id == chat.leaf_id
        request = pytest.importorskip("dsv41chat.ui.screens.export")
        text = request.compose_export(app.store, request.ExportRequest(chat.conversation, chat.leaf_id, None, scope="all"))
        assert "answer new" in text and "answer 4" in text


async def test_regenerate_makes_siblings_with_their_own_seed(tmp_path):
    app = make_app(tmp_path, Script(answer=lambda ids, seed, temperature: f"seed {seed}"), config="")
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        chat.change_option("seed", 7)
        await say(pilot, app, "hello")
        chat._finish = None
        await pilot.press("ctrl+r")
        await ended(chat)
        await shows(app, "2/2", "seed 8")
        await pilot.press("tab", "b")
        await until(lambda: isinstance(app.screen, AskScreen))
        await shows(app, "seed 7")


async def test_continue_goes_on_from_the_kept_text(tmp_path):
    app = make_app(tmp_path, Script(answer="abc " * 3000, delay_s=0.005))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await pilot.press(*"go", "enter")
        await until(lambda: chat._answer is not None and len(chat._answer.text) > 30)
        await pilot.press("escape")
        await until(lambda: not chat.pump.running)
        kept = app.store.message(chat.leaf_id).text
        app.host.engine.script.answer, app.host.engine.script.delay_s = "the rest", 0
        chat._finish = None
        chat.action_continue_answer()
        await ended(chat)
        message = app.store.message(chat.leaf_id)
        assert message.text.startswith(kept) and message.text.endswith("the rest") and chat.transcript.entries[-1].text == message.text


async def test_copy_gives_sources_exactly(tmp_path):
    app = make_app(tmp_path, Script(answer=CODE))
    async with app.run_test(size=(100, 40), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await pilot.press("tab", "c")
        await until(lambda: app.clipboard == CODE)
        await pilot.press("y")
        await until(lambda: isinstance(app.screen, AskScreen))
        await pilot.press("down", "enter")
        await until(lambda: app.clipboard == "ls\n" and app.screen is chat)
        await shows(app, "characters:")
        await pilot.press("k", "c")
        await until(lambda: app.clipboard == "hello")


async def test_mouse_selection_undoes_wrapping(tmp_path):
    text = "a paragraph that is long enough to be wrapped in a narrow terminal " * 3
    app = make_app(tmp_path, Script(answer=text))
    async with app.run_test(size=(50, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await shows(app, "prefilled")
        y = next(y for y, line in enumerate((await drawn(app)).splitlines()) if "a paragraph" in line)
        await pilot.mouse_down(chat.transcript, offset=(2, y - 1))
        await pilot.hover(chat.transcript, offset=(30, y + 1))
        await pilot.mouse_up(chat.transcript, offset=(30, y + 1))
        await until(chat.get_selected_text)
        selected = chat.get_selected_text()
        assert selected and "\n" not in selected and text.startswith(selected)


async def test_find_walks_through_the_hits(tmp_path):
    app = make_app(tmp_path, Script(answer="needle in hay\n\nmore needle\n"))
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "where is the Needle?")
        await pilot.press("ctrl+f", *"needle")
        await until(lambda: "3 of 3" in screen_text(app) and chat._find_timer is None)
        await pilot.press("enter")
        await until(lambda: "1 of 3" in screen_text(app))
        await pilot.press("shift+enter")
        await until(lambda: "3 of 3" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: "3 of 3" not in screen_text(app))
        await pilot.press("tab", "n")
        await until(lambda: chat._hit == 0)


async def test_search_everywhere_opens_the_message_on_its_branch(tmp_path):
    store = Store.memory(background=False)
    conversation = store.new_conversation("trees")
    first = store.add_message(conversation.id, None, "user", "hidden walnut question")
    store.add_message(conversation.id, None, "user", "other branch")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.action_search_everywhere()
        await until(lambda: isinstance(app.screen, SearchScreen) and app.screen.focused is not None)
        await pilot.press(*"walnut")
        await shows(app, "hidden walnut")
        await pilot.press("enter")
        await until(lambda: chat.leaf_id == first.id)
        await until(lambda: chat.transcript.selected_entry is not None and chat.transcript.selected_entry.key == first.id)


async def test_the_filter_of_the_list_opens_the_place_in_the_text(tmp_path):
    store = Store.memory(background=False)
    conversation = store.new_conversation("trees")
    long = "a line\n\n" * 60
    first = store.add_message(conversation.id, None, "user", f"{long}hidden walnut question\n\n{long}")
    store.add_message(conversation.id, None, "user", "other branch")
    store.add_message(store.new_conversation("Walnut by name").id, None, "user", "nothing")
    app = make_app(tmp_path, Script(), store=store)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("ctrl+o", "slash", *"walnut")
        # The conversation, then the line of context below it.
        await until(lambda: "hidden walnut question" in screen_text(app) and "Walnut by name" in screen_text(app))
        await pilot.press("down", "down", "down", "enter")
        await until(lambda: chat.leaf_id == first.id)
        await until(lambda: "hidden walnut question" in screen_text(app))
        await until(lambda: chat.transcript.selected_entry is not None and chat.transcript.selected_entry.key == first.id and chat._hit == 0)
        # A conversation that only its text matches opens there too; one whose title matches opens at its end.
        for title, leaf, hit in (("trees", first.id, 0), ("Walnut by name", None, -1)):
            await until(lambda: app.screen is chat)
            await pilot.press("ctrl+o", "slash", *"walnut")
            await until(lambda: isinstance(app.screen, ConversationsScreen) and app.screen.query_one("#list-filter").value == "walnut")
            await shows(app, "hidden walnut question")
            rows = app.screen._rows
            app.screen._open(next(row.id for row in rows if row.title == title))
            await until(lambda title=title: app.screen is chat and chat.conversation.title == title)
            await until(lambda hit=hit: chat._hit == hit)
            await until(lambda leaf=leaf: leaf is None or chat.leaf_id == leaf)


async def test_commands_act_and_unknown_ones_keep_the_text(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press(*"/continue", "enter")
        await shows(app, "There is nothing to continue yet.")
        await pilot.press(*"/efort", "enter")
        await shows(app, "/effort?")
        assert chat.composer.text == "/efort"
        chat.composer.reset()
        await pilot.press(*"/eff", "tab", *"o", "tab", "enter")
        await until(lambda: chat.new_settings["effort"] == "off")
        await pilot.press(*"/set temperature 0.5", "enter")
        await until(lambda: chat.composer.text == "")
        await pilot.press(*"/set temperature hot", "enter")
        await shows(app, "must be")
        chat.composer.reset()
        await say(pilot, app, "//hello")
        message = app.store.message(chat.leaf_id)
        assert message.params["effort"] == "off" and message.params["temperature"] == 0.5
        assert app.store.message(message.parent_id).text == "/hello"
        await pilot.press(*"/set top_p 0.9", "enter")
        await until(lambda: app.store.conversation(chat.conversation.id).settings["top_p"] == 0.9)
        await pilot.press(*"/stats", "enter")
        await shows(app, "decode rate")


async def test_files_become_chips_and_bad_ones_are_refused(tmp_path):
    good, bad = tmp_path / "notes.txt", tmp_path / "data.bin"
    good.write_text("inside ``` the file\n")
    bad.write_bytes(b"\xff\xfe\x00")
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        chat.composer.insert(f"/read {bad}")
        await pilot.press("enter")
        # On the screen the sentence is wrapped wherever its path makes it.
        await until(lambda: any("is not text (it holds NUL bytes)" in notice.message for notice in app._notifications))
        assert chat.composer.text.startswith("/read")
        chat.composer.reset(f"/read {good}")
        await pilot.press("enter")
        await until(lambda: "[file 1: notes.txt, 1 line]" in chat.composer.text)
        assert chat.composer.text.endswith("\n\n"), "what is typed next does not stand on the line of the closing fence"
        chat.composer.reset()
        chat.composer.insert(f"see @{tmp_path}/no")
        await pilot.press("tab")
        await until(lambda: chat.composer.text.endswith("notes.txt"))
        await pilot.press("tab")
        await until(lambda: "[file 2: notes.txt, 1 line]" in chat.composer.text)
        await until(lambda: chat.status.forecast > 0 and "tokens" in screen_text(app))
        chat._finish = None
        await pilot.press("enter")
        await ended(chat)
        assert "File: notes.txt\n````\ninside ``` the file\n````" in app.store.path_to(chat.leaf_id)[2].text


async def test_settings_show_origins_and_write_the_file(tmp_path):
    app = make_app(tmp_path, Script(), config='# mine\n[ui]\nmath = "source"\n')
    async with app.run_test(size=(100, 36), notifications=True) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        await pilot.press("f8")
        await shows(app, "temperature", "default", "[Conversation]")
        await pilot.press("tab")
        await shows(app, "ui.math", "file")
        index = [row.name for row in app.screen._rows].index("ui.wrap_code")
        await pilot.press(*["down"] * index, "enter")
        await until(lambda: app.settings.ui.wrap_code and chat.transcript.wrap_code)
        await until(lambda: "wrap_code = true" in (tmp_path / "config.toml").read_text())
        assert "# mine" in (tmp_path / "config.toml").read_text()
        await pilot.press("d")
        await until(lambda: not app.settings.ui.wrap_code)
        assert (tmp_path / "config.toml").read_text() == '# mine\n[ui]\nmath = "source"\n', "the line is gone, as the column says"
        await pilot.press("escape")
        await until(lambda: app.screen is chat)
        await say(pilot, app, "hello")


async def test_a_route_that_this_machine_does_not_have_is_marked_and_its_remedy_is_a_command(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 36), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await pilot.press("f8", "tab", "tab")
        await until(lambda: "engine.routes" in [row.name for row in app.screen._rows])
        await pilot.press(*["down"] * [row.name for row in app.screen._rows].index("engine.routes"), "enter")
        shown = await shows(app, "cuda  not here: for cuda, this device is cpu", "metal  not here")
        assert shown.count("not here") == 2
        await pilot.press("escape", "escape")
        await until(lambda: app.screen is chat)

        def opener(folder, **options):
            raise RouteUnavailable("the route cuda is for cuda, this device is cpu", "dsv41chat config set engine.routes auto")

        app.host._opener = opener
        await asyncio.to_thread(app.host.unload)
        chat.switch_build("nano")
        await shows(app, "was not loaded: the route cuda is for cuda, this device is cpu", "→ dsv41chat config")


async def test_a_failed_switch_leaves_the_old_build_answering(tmp_path):
    script = Script(answer="old build")
    app = make_app(tmp_path, script)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        app.store.builds.add(other)
        await pilot.press("f2")
        await until(lambda: isinstance(app.screen, BuildsScreen))
        assert "Switching now" not in await shows(app, "other", "loaded")  # the highlighted one answers already
        plain = app.host._opener

        def opener(folder, **options):
            if folder.name == "other":
                raise DoesNotFit("this pack needs 427 GiB, 128 GiB are there.", hint="a smaller pack")
            return plain(folder, **options)

        app.host._opener = opener
        index = [row.ref.name for row in app.screen._rows].index("other")
        now = app.screen.query_one("#list").highlighted
        await pilot.press(*["down" if index > now else "up"] * abs(index - now))
        await until(lambda: "Switching now: history" in screen_text(app))
        await pilot.press("enter")
        await shows(app, "was not loaded", "427 GiB", "nano goes on answering")
        await until(lambda: not chat.switching)
        await say(pilot, app, "again")
        assert app.store.message(chat.leaf_id).text == "old build" and app.store.message(chat.leaf_id).build_name == "nano"
        app.host._opener = plain
        chat.switch_build("other")
        await until(lambda: app.host.view is not None and app.host.view.name == "other" and not chat.switching)
        await say(pilot, app, "third")
        assert app.store.message(chat.leaf_id).build_name == "other"


async def test_the_build_menu_shows_what_was_measured_of_this_fingerprint(tmp_path):
    app = make_app(tmp_path, Script())
    receipts = Receipts(app.host.settings.paths.state)
    long = "ppl 2.8963 [2.7103, 3.0933] on wiki.txt, 286,580 tokens"
    receipts.put("f" * 64, "ppl", "a", {"arm": "ppl", "summary": long, "short": "ppl 2.8963", "time": 1.0})
    receipts.put("0" * 64, "selfcheck", "b", {"arm": "selfcheck", "summary": "of another build", "short": "other", "time": 2.0})
    async with app.run_test(size=(110, 30)) as pilot:
        await pilot.press("f2")
        assert "other" not in await shows(app, "ppl 2.8963")
        await pilot.press("i")
        await until(lambda: "286,580 tokens" in screen_text(app))


@pytest.mark.parametrize("verdict", ["tight", "no"])
async def test_a_tight_build_asks_with_the_whole_sum(tmp_path, verdict):
    app = make_app(tmp_path, Script(answer="I am here"))
    plain = app.host._prober

    def prober(folder):
        info = plain(folder)
        info.admission = SimpleNamespace(verdict=verdict, context=4096, words="93.0 GB + 4.0 GB = 97.0 GB of 128.0 GB", remedies=("--context 2048",))
        return info

    app.host._prober = prober
    async with app.run_test(size=(100, 30)) as pilot:
        await shows(app, "97.0 GB of 128.0 GB", "--context 2048")
        assert app.host.engine is None
        await pilot.press("down", "enter")
        await until(lambda: app.host.engine is not None)
        assert app.host.force == (verdict == "no")
        await until(lambda: app.screen is chat_of(app) and not chat_of(app).switching)
        await say(pilot, app, "hello")
        await shows(app, "I am here")


async def test_a_store_that_refuses_leads_to_memory_and_back(tmp_path):
    store = Store.open(tmp_path / "data")
    app = make_app(tmp_path, Script(answer="kept"), store=store)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "first")
        real = store.add_message

        def full(*args, **options):
            raise StoreFull("the disk is full", "free some space")

        store.add_message = full
        await say(pilot, app, "second")
        await shows(app, "not saved")
        await until(lambda: chat.composer.text == "second")
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "kept", "second", "kept"] and app.store.path is None
        store.add_message = real
        chat.action_save_again()
        await until(lambda: app.store.path is not None and chat.conversation is not None)
        await until(lambda: "not saved" not in screen_text(app).splitlines()[0])
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "kept", "second", "kept"]
    app.store.close()
    store.close()


async def test_a_full_context_offers_what_can_be_done(tmp_path):
    script = Script(answer="long answer " * 40)
    app = make_app(tmp_path, script)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        for number in range(3):
            await say(pilot, app, f"question {number}")
        script.error = ContextFull("The prompt has 9,000 tokens.")
        await say(pilot, app, "one more")
        await until(lambda: isinstance(app.screen, AskScreen))
        await shows(app, "without the")
        script.error, script.answer = None, "short"
        chat._finish = chat._failure = None
        await pilot.press("down", "enter")
        await ended(chat)
        path = app.store.path_to(chat.leaf_id)
        assert path[-1].text == "short" and path[-2].text == "one more" and len(path) < 8


async def test_two_processes_second_is_read_only(tmp_path):
    from dsv41chat.store import Locked

    store = Store.memory(background=False)
    conversation = store.new_conversation("shared")
    store.add_message(conversation.id, None, "user", "hello")

    def locked(*_):
        raise Locked("open elsewhere", pid=4711)

    app = make_app(tmp_path, Script(), store=store)
    real, store.lock = store.lock, locked
    app.begin = AppStart(view=app.controller.open("shared"))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await shows(app, "read-only", "4711")
        await until(lambda: not chat.starting)
        await pilot.press("x", "enter")
        await shows(app, "read-only here")
        assert len(store.tree(conversation.id)) == 1
        store.lock = real
        chat.action_take_over()
        await until(lambda: not chat.readonly)
        chat._finish = None
        await pilot.press("enter")
        await ended(chat)


async def test_view_and_draft_return(tmp_path):
    store = Store.memory(background=False)
    app = make_app(tmp_path, Script(answer="line\n\n" * 60, thinking="deep"), store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        await pilot.press("ctrl+t", "pageup", "pageup", *"draft")
        await until(lambda: chat.composer.text == "draft" and not chat.transcript.follow and chat.transcript.entries[-1].thinking_view == "show")
        top = (await drawn(app)).splitlines()[1:4]
        app.leave()
        await until(lambda: not app.is_running or app._exit)
    again = make_app(tmp_path, Script(), store=store)
    again.begin = AppStart(view=again.controller.open(None))
    async with again.run_test(size=(80, 24)) as pilot:
        chat = chat_of(again)
        await until(lambda: not chat.starting)
        await until(lambda: screen_text(again).splitlines()[1:4] == top and chat.composer.text == "draft")
        assert chat.transcript.entries[1].thinking_view == "show"


async def test_export_page_writes_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = make_app(tmp_path, Script(answer=CODE))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "Engram questions?")
        chat.action_export()
        await shows(app, "Export", "engram-questions-")
        await pilot.press("enter")
        text = lambda: "".join(file.read_text() for file in tmp_path.glob("engram-questions-*.md"))
        await until(lambda: "print(1)" in text() and "# Engram questions?" in text())
        chat.run_command("/export json")
        await until(lambda: list(tmp_path.glob("engram-questions-*.json")))


def test_file_names_are_never_overwritten(tmp_path):
    name = file_name("Was ist 世界? / a", "md", 0)
    assert name.startswith("was-ist-世界-a-19") and name.endswith(".md") and "/" not in name
    (tmp_path / "a.md").write_text("x")
    assert free_path(tmp_path / "a.md") == tmp_path / "a-2.md"


async def test_every_action_of_the_table_is_bound_listed_and_exists(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 40)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        commands = {command.title for command in app.get_system_commands(chat)}
        bound = {binding.id for widget in (chat, chat.composer, chat.transcript) for _, binding in widget._bindings}
        for key in KEYS:
            if key.fixed:
                continue
            owner, name = (app, key.action[4:]) if key.action.startswith("app.") else (chat, key.action)
            assert hasattr(owner, f"action_{name.partition('(')[0]}"), key.id
            assert not key.key or key.id in bound, key.id
            assert key.title in commands or key.id.startswith("list.recent") or key.id == "app.palette", key.id
        await pilot.press("f1")
        await until(lambda: len(app.screen.query(".help-column")) > 0)
        await shows(app, "arrows scroll")
        text = "\n".join(str(widget.render()) for widget in app.screen.query(".help-column"))
        for context in (CHAT, COMPOSER, GLOBAL, TRANSCRIPT):
            for key in (key for key in KEYS if key.context == context and key.key and not key.id.startswith("list.recent")):
                assert key.title in text and display(key.key) in text


async def test_the_user_keymap_moves_keys_and_reports_clashes(tmp_path):
    assert clashes({"chat.regenerate": "ctrl+y"}) == []
    assert "ctrl+n" in clashes({"chat.regenerate": "ctrl+n"})[0] and "no such" in clashes({"chat.nothing": "x"})[0]
    app = make_app(tmp_path, Script(answer="again"), config='[keys]\n"chat.regenerate" = "f9"\n')
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        chat._finish = None
        await pilot.press("f9")
        await ended(chat)
        assert len(app.store.tree(chat.conversation.id)) == 3


async def test_the_editor_gets_and_gives_the_text(tmp_path, monkeypatch):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.composer.insert("start")
        ran = []

        def run(command, terminal):
            ran.append(Path(command[-1]).read_text())
            Path(command[-1]).write_text("edited\n")
            return 0

        monkeypatch.setattr("dsv41chat.ui.screens.chat_tools.run_outside", run)
        from contextlib import nullcontext

        monkeypatch.setattr(app, "suspend", nullcontext)
        await pilot.press("ctrl+g")
        await until(lambda: chat.composer.text == "edited")
        assert ran == ["start"]


async def test_save_only_and_fork(tmp_path):
    app = make_app(tmp_path, Script(answer="one"))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "question")
        original = chat.conversation.id
        await pilot.press("tab", "g", "e")
        await until(lambda: chat.editing is not None and chat.focused is chat.composer)
        await pilot.press(*" two")
        await until(lambda: chat.composer.text == "question two")
        chat.action_save_only()
        await until(lambda: chat.transcript.entries and chat.transcript.entries[0].text == "question two")
        assert [m.text for m in app.store.tree(original) if m.role == "user"] == ["question", "question two"] and len(app.store.tree(original)) == 3
        chat.action_fork()
        await until(lambda: chat.conversation.id != original)
        assert [m.text for m in app.store.tree(chat.conversation.id)] == ["question two"] and len(app.store.tree(original)) == 3


async def test_the_cost_of_a_rewrite_is_said(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        chat = chat_of(app)
        await say(pilot, app, "hello")
        used = chat.status.context_used
        assert f"prefills all {used:,} tokens" in chat.rewrite_cost()
        await pilot.press("f8")
        await shows(app, f"all {used:,} tokens")
        await pilot.press("escape")
        await until(lambda: app.screen is chat)
        chat.change_option("effort", "off")
        await say(pilot, app, "again")
        assert app.store.conversation(chat.conversation.id).settings["effort"] == "off"


async def test_the_mouse_can_be_given_away(tmp_path):
    app = make_app(tmp_path, Script())
    calls = []
    async with app.run_test(size=(80, 24)):
        await until(lambda: not chat_of(app).starting)
        app._driver._disable_mouse_support = lambda: calls.append("off")
        app._driver._enable_mouse_support = lambda: calls.append("on")
        chat_of(app).action_toggle_mouse()
        chat_of(app).action_toggle_mouse()
        await until(lambda: len(calls) >= 2)
    assert calls[:2] == ["off", "on"]
