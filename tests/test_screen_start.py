"""What the command line hands to the full screen: every option that the screen has, and when the screen is chosen at all."""

from __future__ import annotations

import pytest

from dsv41chat.store import Store
from tests.ui.fakes import Script


@pytest.fixture
def screen(program, monkeypatch):
    """Runs the program on a terminal with a screen that only takes note; returns (result, AppStart, options of a turn)."""

    def run(*argv, **options):
        seen = []

        def run_app(controller, start):
            view = start.view
            seen.append((start, controller.options(view.conversation if view else None), controller))
            return 0

        monkeypatch.setattr("dsv41chat.ui.app.run_app", run_app)
        result = program(*argv, terminal=True, **options)
        return result, *(seen[0] if seen else (None, None, None))

    return run


def test_a_terminal_gets_the_screen(screen):
    result, start, options, _ = screen()
    assert result.code == 0 and (start.view, start.prompt, start.attachments, start.save) == (None, "", (), True)
    assert options.temperature == 1.0


def test_options_of_the_screen(screen):
    _, start, _, _ = screen("--pick", "--theme", "dark", "--no-mouse", "--send", "-m", "nano", "-s", "sys", "a prompt")
    assert (start.pick, start.theme, start.mouse, start.send, start.build, start.system, start.prompt) == (
        True, "dark", False, True, "nano", "sys", "a prompt",
    )  # fmt: skip


def test_options_of_a_turn_hold_on_the_screen(screen):
    words = ["--temperature", "0.8", "--seed", "7", "--effort", "low", "--max-tokens", "5", "--stop", "x", "--draft", "off", "--top-p", "0.5"]
    _, _, options, controller = screen(*words)
    assert (options.temperature, options.seed, options.effort, options.max_tokens, options.stop, options.draft, options.top_p) == (
        0.8, 7, "low", 5, ("x",), "off", 0.5,
    )  # fmt: skip
    _, _, _, controller = screen("--no-cache", "--allow-second")
    assert controller.host.fresh_sessions and controller.host.allow_second


def test_files_are_attachments(screen, tmp_path):
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "p.txt").write_text("the prompt")
    _, start, _, _ = screen("-f", str(tmp_path / "a.txt"), "--prompt-file", str(tmp_path / "p.txt"))
    assert start.attachments == (("a.txt", "alpha"),) and start.prompt == "the prompt"


def test_piped_text_is_an_attachment_and_keys_come_from_the_terminal(screen, monkeypatch):
    reopened = []
    monkeypatch.setattr("dsv41chat.cli._reopen_keys", lambda: reopened.append(True))
    _, start, _, _ = screen(stdin="piped\n")
    assert start.attachments == (("stdin", "piped"),) and reopened
    _, start, _, _ = screen("--no-stdin", stdin="piped\n")
    assert start.attachments == ()


def test_which_conversation(screen, program):
    result, start, _, _ = screen("-c")
    assert result.code == 0 and start.view is None and "no conversation" in " ".join(start.notices)
    one = program("--json", "first").object
    _, start, _, _ = screen("-c")
    assert start.view.conversation.id == one["conversation"] and not start.view.readonly
    _, start, _, _ = screen("--resume", "first", "--readonly")
    assert start.view.conversation.id == one["conversation"] and start.view.readonly and start.readonly
    _, start, _, _ = screen("--conversation", "a new one")
    assert start.view is None and start.title == "a new one"
    with Store.open(program.data, readonly=True) as store:
        question = store.message(one["message_id"]).parent_id
    _, start, _, _ = screen("--branch", question)
    assert [m.id for m in start.view.messages] == [question]
    _, start, _, _ = screen("-c", "--fork")
    assert start.view.conversation.id != one["conversation"]
    assert screen("--resume", "none")[0].code == 6
    _, start, _, controller = screen("--no-save", "-c")
    assert not start.save and controller.store.path is None and len(start.view.messages) == 2


def test_without_a_back_end_the_screen_opens_for_reading(screen, monkeypatch):
    assert screen()[1].backend_missing is None
    monkeypatch.setattr("dsv41chat.engine.backend.find_spec", lambda name: None, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "mlx.core", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    result, start, _, _ = screen()
    assert result.code == 0 and "pip install" in start.backend_missing


def test_a_database_that_cannot_be_opened_is_said_on_the_screen(screen, program):
    program.data.mkdir()
    (program.data / "chat.db").write_bytes(b"not a database" * 300)
    result, start, _, controller = screen()
    assert result.code == 0 and any("not saved" in notice for notice in start.notices) and controller.store.path is None


def test_conversations_in_a_folder_that_cannot_be_written_are_there(screen, program, monkeypatch):
    one = program("--headless", "--json", "-p", "first").object
    # Rights do not stop root, so the answer of the system is replaced.
    monkeypatch.setattr("dsv41chat.store.db.access", lambda place, mode: False)
    result, start, _, controller = screen("-c")
    assert result.code == 0 and any("cannot be written" in notice for notice in start.notices)
    assert start.view.conversation.id == one["conversation"] and len(start.view.messages) == 2 and not start.view.readonly
    with Store.memory(copy_of=program.data) as store:
        assert [row.id for row in store.list_conversations()] == [one["conversation"]]
        store.add_message(one["conversation"], store.last_conversation().leaf_id, "user", "more")
    with Store.open(program.data, readonly=True) as store:
        assert len(store.tree(one["conversation"])) == 2


def test_on_leaving_it_says_how_to_come_back(program, monkeypatch):
    one = program("--json", "first").object["conversation"]
    monkeypatch.setattr("dsv41chat.ui.app.run_app", lambda controller, start: 0)
    assert f"--resume {one}" in program("-c", terminal=True).err
    assert program("-c", "-q", terminal=True).err == ""
    assert "--resume" not in program(terminal=True).err


def test_the_screen_takes_one_prompt(screen):
    assert screen("-p", "a", "-p", "b")[0].code == 2


def test_a_dumb_terminal_is_answered_in_lines(program, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    result = program("hi", terminal=True)
    assert result.code == 0 and result.out == "Hello from the fake engine.\n" and "--headless" in result.err


@pytest.mark.parametrize("option", ["--json", "--stream-json", "--text", "--no-stream", "--show-thinking", "--extract=sh", "--strict", "--timeout=9"])
def test_an_option_of_scripted_mode_implies_it(program, option):
    result = program(option, "hi", terminal=True)
    assert result.code == 0 and result.out


def test_verbose_on_the_screen_goes_to_the_log_only(screen, program):
    result, *_ = screen("-vv", "--log-file", str(program.data / "x.log"))
    assert result.err == "" and (program.data / "x.log").exists()


def test_interrupted_answers_are_on_the_first_page(screen, program, monkeypatch):
    from tests.ui.program import child

    dying = child(program.data, ["--stream-json", "--effort", "off", "hi"], {"answer": "word " * 200, "delay_s": 0.005})
    while b'"delta"' not in dying.stdout.readline():
        assert dying.poll() is None
    dying.kill()
    dying.wait()
    _, start, _, _ = screen(script=Script())
    assert any(notice.startswith("interrupted") for notice in start.notices)


def test_a_theme_that_is_not_there_is_refused(program):
    result = program("--theme", "lihgt", terminal=True)
    assert result.code == 2 and "did you mean light" in result.err


def test_a_theme_of_the_file_that_is_not_there_does_not_count_beside_one_of_the_command_line_or_in_lines(screen, program, tmp_path):
    (tmp_path / "c.toml").write_text('[ui]\ntheme = "nosuch"\n')
    result, start, *_ = screen("--theme", "nord", "--config", str(tmp_path / "c.toml"))
    assert result.code == 0 and start.theme == "nord"
    result = program("--plain", "--config", str(tmp_path / "c.toml"), stdin=b"")
    assert result.code == 0 and "theme" not in result.err
