"""No byte of any text acts on the terminal: what the program writes to one, byte for byte, with texts that try."""

from __future__ import annotations

import json
import re

import pytest
from textual import events
from textual.widgets import Input

from dsv41chat.store import Store
from dsv41chat.ui.sanitize import json_text
from tests.ui.fakes import Script
from tests.ui.test_plain import chat as line_mode
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, until

CONTROLS = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0x2066)))
NASTY = f"a\x1b]0;TITLE\x07b\x9b31mc\x1b[2J\x1bPq\x1b\\d\x90e\x9cf\x1b]52;c;AAAA\x07\r\n```sh\n\x1b[5mblink\n```\n{CONTROLS}end"
MEGABYTE = (NASTY * (1_000_000 // len(NASTY) + 1))[:1_000_000]
ACTING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")  # all but the line feed


def test_the_pattern_would_see_each(program):
    for code in map(chr, (0x1B, 0x07, 0x0D, 0x08, 0x90, 0x9B, 0x9C, 0x9D, 0x7F, 0x00)):
        assert ACTING.search(f"text {code} text")
    assert ACTING.search(program("--headless", "hi", script=Script(NASTY)).out), "a pipe gets the text as it is"


@pytest.fixture
def conversation(program):
    """A conversation in which everything tries: title, system prompt, both messages, the thinking."""
    script = Script(NASTY, thinking=NASTY)
    return program("--json", "-s", NASTY, NASTY, script=script).object["conversation"]


@pytest.mark.parametrize(
    "words",
    [
        ["list"], ["list", "--json"], ["list", "--search", NASTY[:40]], ["show", "ID"], ["show", "ID", "--thinking"], ["show", "ID", "--tree"],
        ["show", "ID", "--json"], *(["export", "ID", "--format", name] for name in ("md", "json", "jsonl", "text")), ["export", "--all"],
        ["show", NASTY[:30]], ["delete", "ID", "--yes"], ["import", f"{NASTY[:8]}.json"],
    ],
    ids=lambda words: " ".join(words)[:20].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_commands(program, conversation, words, monkeypatch):
    monkeypatch.setenv("PAGER", "false")  # without a pager its text goes straight to the terminal
    with Store.open(program.data) as store:
        store.rename(conversation, NASTY)
    result = program("conversations", *(conversation if word == "ID" else word for word in words), terminal=True)
    assert result.out + result.err and not ACTING.search(result.out + result.err)


def test_what_the_pager_gets(program, conversation, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGER", f"cat > {tmp_path / 'paged'}")
    program("conversations", "show", conversation, "--thinking", terminal=True)
    text = (tmp_path / "paged").read_text()
    assert "TITLE" in text and not ACTING.search(text)


def test_what_json_holds_is_the_text_itself(program, conversation):
    """Escaped, not replaced: the same data, on a terminal and in a pipe."""
    for terminal in (False, True):
        shown = program("conversations", "export", conversation, "--format", "json", terminal=terminal).out
        assert not ACTING.search(shown)
        question, answer = json.loads(shown)["messages"]
        assert (question["text"], answer["text"], answer["thinking"]) == (NASTY, NASTY, NASTY)
    assert json.loads(json_text({"a": NASTY, NASTY: 1})) == {"a": NASTY, NASTY: 1} and "\n" not in json_text([NASTY])


@pytest.mark.parametrize("mode", ["--text", "--json", "--stream-json", "--show-thinking", "--no-stream", "--extract"])
def test_scripted_mode_on_a_terminal(program, mode, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")  # our own colours are sequences too
    result = program("--headless", mode, "--progress", "never", NASTY, script=Script(NASTY, thinking=NASTY), terminal=True)
    assert result.code == 0 and ("blink" in result.out or "TITLE" in result.out) and not ACTING.search(result.out + result.err)


def test_errors_and_notices(program, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    for words in (["-m", NASTY, "hi"], ["--resume", NASTY, "hi"], ["-f", f"/{NASTY[:60]}", "hi"], [f"--{NASTY}"], ["--effort", NASTY, "hi"]):
        result = program("--headless", *words, terminal=True)
        assert result.code and result.err and not ACTING.search(result.out + result.err)
    failing = program("--headless", "-vv", "--progress", "never", "hi", script=Script(error=ValueError(NASTY)), terminal=True)
    assert failing.code == 1 and not ACTING.search(failing.out + failing.err)
    batch = json.dumps({"id": NASTY, "prompt": NASTY}) + "\n"
    result = program("--batch", "-", "--progress", "never", stdin=batch, script=Script(NASTY), terminal=True)
    assert json.loads(result.out)["text"] == NASTY and not ACTING.search(result.out + result.err)


def test_the_line_mode(tmp_path):
    plain = line_mode(tmp_path, [NASTY.replace("\n", " "), f"/{NASTY[:20]}", f"/open {NASTY[:20]}", "/open", "/quit"], Script(NASTY, thinking=NASTY))
    plain.run()
    assert "TITLE" in plain.out.getvalue() and not ACTING.search(plain.out.getvalue())


def test_a_megabyte(program, tmp_path, monkeypatch):
    """Stored, shown and exported whole."""
    monkeypatch.setenv("PAGER", "false")
    with Store.open(program.data) as store:
        key = store.new_conversation().id
        question = store.add_message(key, None, "user", MEGABYTE)
        writer = store.begin_answer(key, question.id, "nano", "f" * 64, {})
        writer.update(MEGABYTE, MEGABYTE)
        writer.finish(state="complete", finish="stop", text=MEGABYTE, thinking=MEGABYTE)
    shown = program("conversations", "show", key, "--thinking", terminal=True).out
    assert len(shown) > 2_900_000 and not ACTING.search(shown)
    file = tmp_path / "big.json"
    assert program("conversations", "export", key, "--format", "json", "-o", str(file)).code == 0
    assert [m["text"] for m in json.loads(file.read_text())["messages"]] == [MEGABYTE, MEGABYTE]
    other = program.at(tmp_path / "other")
    assert other("conversations", "import", str(file)).code == 0
    assert json.loads(other("conversations", "export", key, "--json").out)["messages"][1]["thinking"] == MEGABYTE


async def test_the_composer_shows_control_characters_as_symbols_and_sends_what_was_pasted(tmp_path):
    """Each takes the cell that it is drawn in: the caret and the end of a row stand where they are seen."""
    pasted = "a\u202eb\u2066c\x07d\x0ce\x85f\u2028g\th"
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(60, 30)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching and not chat.starting)
        chat.composer.take(pasted)
        await shows(app, "a\ufffdb\ufffdc\u2407d\u240ce\ufffdf\u2424g")
        assert not set("\u202e\u2066\x07\x0c\x85\u2028") & set(screen_text(app))
        assert chat.composer.text == pasted and chat.composer.document.line_count == 1
        await pilot.press("home", "right", "right")
        assert chat.composer.cursor_location == (0, 2) and chat.composer.wrapped_document.location_to_offset((0, 2)).x == 2
        await pilot.press("end", "x", "backspace", "enter")
        await ended(chat)
        assert app.store.path_to(chat.leaf_id)[0].text == pasted
        await shows(app, "a\ufffdb\ufffdc\u2407d\u240c")
        chat.composer.take("\u202e" * 100 + "z")
        assert chat.composer.wrapped_document.height == 2
        await until(lambda: screen_text(app).count("\ufffd") >= 100 and "\ufffdz" in screen_text(app))
        await pilot.press("ctrl+z")
        await until(lambda: chat.composer.text == "")


PASTED = "a\u202eb\x07c\x1b[31md\x0ce\u2028f\tg\u2066h"


async def field_of(pilot, app, chat, where: str) -> Input:
    """The input line of a page, opened as a user would."""
    if where in ("rename", "list rename"):
        await (pilot.press("ctrl+o", "r") if where.startswith("list") else app.run_action("rename", chat))
    elif where == "settings":
        await pilot.press("f8", "enter")
    elif where == "search":
        await app.run_action("search_everywhere", chat)
    elif where == "theme":
        await app.run_action("app.change_theme", chat)
    else:
        await pilot.press(*{"filter": ["ctrl+o", "slash"], "find": ["ctrl+f"], "palette": ["ctrl+p"]}[where])
    await until(lambda: isinstance(app.focused, Input))
    return app.focused


@pytest.mark.parametrize("where", ["rename", "list rename", "filter", "find", "search", "settings", "palette", "theme"])
async def test_every_input_line_shows_symbols_and_keeps_what_was_pasted(tmp_path, where):
    """As the composer: each takes the cell that it is drawn in, an escape goes, and the rest is what is stored."""
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 36)) as pilot:
        chat = chat_of(app)
        await until(lambda: app.host.engine is not None and not chat.switching and not chat.starting)
        await say(pilot, app, "hello")
        field = await field_of(pilot, app, chat, where)
        field.value = ""
        app.post_message(events.Paste(PASTED + "\nsecond line"))
        await until(lambda: bool(field.value))
        shown = await shows(app, "a\ufffdb\u2407c[31md\u240ce\u2424f g\ufffdh")
        assert not ACTING.search(shown)
        kept = PASTED.replace("\x1b", "")
        assert field.value == kept and field.cursor_position == len(kept)
        left = field.content_region.x - field.scroll_offset.x
        assert field.cursor_screen_offset.x == left + len(kept) + 1, "behind the last, as Textual has it"
        await pilot.press("home", *["right"] * 4)
        assert field.cursor_screen_offset.x == left + 4 and field._cell_offset_to_index(4) == 4
        await pilot.press("delete", "X")
        kept = kept[:4] + "X" + kept[5:]
        assert field.value == kept
        if where not in ("rename", "list rename", "settings"):
            return
        await pilot.press("enter")
        if where == "settings":
            await until(lambda: chat.option_values()["system"][0] == kept)
            assert app.store.conversation(chat.conversation.id).settings["system"] == kept
        else:
            await until(lambda: app.store.conversation(chat.conversation.id).title == kept)
        assert not ACTING.search(await drawn(app))


async def test_a_value_of_several_lines_is_opened_and_left_as_it_is(tmp_path):
    app = make_app(tmp_path, Script())
    async with app.run_test(size=(100, 36)) as pilot:
        chat = chat_of(app)
        await until(lambda: not chat.starting)
        chat.new_settings["system"] = "be brief\nbe\u202e kind"
        field = await field_of(pilot, app, chat, "settings")
        shown = await shows(app, "be brief\u2424be\ufffd kind")
        assert not ACTING.search(shown) and field.value == "be brief\nbe\u202e kind"
        await pilot.press("end", "!", "enter")
        await until(lambda: chat.new_settings["system"] == "be brief\nbe\u202e kind!")


def test_the_document_of_the_composer_edits_as_textuals_does():
    """On texts that have line feeds only, both hold the same after the same edits."""
    import random

    from textual.document._document import Document

    from dsv41chat.ui.widgets.composer_document import PlainDocument

    draw = random.Random(3)
    ours, theirs = PlainDocument("one\ntwo\n"), Document("one\ntwo\n")
    for _ in range(300):
        places = [(row := draw.randrange(ours.line_count), draw.randint(0, len(ours.get_line(row)))) for _ in range(2)]
        text = "".join(draw.choice("ab\n") for _ in range(draw.randrange(4)))
        assert ours.replace_range(*places, text) == theirs.replace_range(*places, text)
        assert ours.text == theirs.text and ours.lines == theirs.lines
