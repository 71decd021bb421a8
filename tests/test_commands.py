"""`conversations`, `models` and `config` on the command line: output, --json, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv41chat.cli_commands import Context, command_parser
from dsv41chat.cli_options import COMMANDS
from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.engine.published import V4_FLASH
from dsv41chat.settings import KEYS
from dsv41chat.store import Store
from dsv41chat.ui.host import EngineHost
from tests.ui.fakes import Script

_told: list[tuple[Path, SimpleNamespace]] = []


@pytest.fixture
def chats(program, tmp_path_factory):
    """Two conversations: one with two branches and thinking, one plain. They are had once, and copied for each test."""
    if not _told:
        told = program.at(tmp_path_factory.mktemp("told") / "data")
        script = Script("first answer", thinking="hm")
        one = told("--json", "--seed", "3", "What is an n-gram?", script=script).object
        told("--json", "-c", "tell me more", script=Script("branch one"))
        told("--json", "--branch", one["message_id"], "other way", script=Script("branch two", finish="length"))
        two = told("--json", "--effort", "off", "second chat").object
        _told.append((told.data, SimpleNamespace(one=one["conversation"], two=two["conversation"], first=one)))
    data, found = _told[0]
    shutil.copytree(data, program.data)
    return found


# conversations -----------------------------------------------------------------------------------------------------------


def test_list(program, chats):
    lines = program("conversations", "list").out.splitlines()
    assert lines[0].split() == ["id", "messages", "tokens", "build", "cached", "updated", "title"]
    assert [line.split()[0] for line in lines[1:]] == [chats.two, chats.one] and lines[2].endswith("What is an n-gram?")
    rows = program("conversations", "list", "--json").object
    assert [(row["id"], row["messages"], row["build"]) for row in rows] == [(chats.two, 2, "nano"), (chats.one, 6, "nano")]
    assert [row["id"] for row in program("conversations", "list", "--search", "branch one", "--json").object] == [chats.one]
    assert len(program("--json", "conversations", "list", "--limit", "1").object) == 1
    assert program("conversations", "list", "--build", "other", "--json").object == []


def test_search(program, chats):
    rows = program("conversations", "search", "branch", "--json").object
    assert [(row["conversation"], row["role"], row["excerpt"]) for row in rows] == [
        (chats.one, "assistant", "branch two"), (chats.one, "assistant", "branch one"),
    ]  # fmt: skip
    assert rows[0]["excerpt"][slice(*rows[0]["match"])] == "branch"
    assert len(program("conversations", "search", "branch", "--limit", "1", "--json").object) == 1
    assert program("conversations", "search", "second", "chat", "--in", chats.one, "--json").object == []
    lines = program("conversations", "search", "second", "chat").out.splitlines()
    assert lines[0].split() == ["id", "message", "written", "by", "text"] and lines[1].startswith(chats.two) and lines[1].endswith("second chat")
    nothing = program("conversations", "search", "nowhere")
    assert (nothing.code, nothing.out) == (0, "") and "nothing found" in nothing.err


def test_wide_characters_count_two_cells(monkeypatch):
    context = Context(None, None, None, None)
    lines = []
    monkeypatch.setattr(context, "print", lines.append)
    context.table(("name", "size"), [("模型", "1"), ("e\u0301t", "2"), ("plain", "3")])
    assert lines == ["name   size", "模型   1", "e\u0301t     2", "plain  3"]


def test_an_empty_list(program):
    result = program("conversations", "list")
    assert (result.code, result.out) == (0, "") and "no conversations" in result.err
    assert program("conversations", "list", "--json").object == []
    assert not program.data.joinpath("chat.db").exists(), "reading makes nothing"


def test_show(program, chats):
    shown = program("conversations", "show", chats.one[:4]).out
    assert "What is an n-gram?" in shown and "first answer" in shown and "branch two" in shown and "branch one" not in shown
    assert "(length limit)" in shown and "hm" not in shown
    assert "hm" in program("conversations", "show", chats.one, "--thinking").out
    with Store.open(program.data, readonly=True) as store:
        other = next(m for m in store.tree(chats.one) if m.text == "branch one")
    assert "branch one" in program("conversations", "show", chats.one, "--branch", other.id).out
    tree = program("conversations", "show", chats.one, "--tree").out
    assert "branch one" in tree and "branch two" in tree and len(tree.splitlines()) == 7
    shown = program("conversations", "show", "second chat", "--json").object
    assert [m["text"] for m in shown["messages"]] == ["second chat", "Hello from the fake engine."]


def test_show_on_a_terminal_goes_through_the_pager(program, chats, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGER", f"cat > {tmp_path / 'paged'}")
    assert program("conversations", "show", chats.one, terminal=True).out == ""
    assert "first answer" in (tmp_path / "paged").read_text()
    monkeypatch.setenv("PAGER", "false")
    assert "first answer" in program("conversations", "show", chats.one, terminal=True).out


def test_export_json_holds_the_whole_tree(program, chats):
    o = json.loads(program("conversations", "export", chats.one, "--format", "json").out)
    assert o["id"] == chats.one and o["title"] == "What is an n-gram?" and len(o["messages"]) == 6
    by_id = {m["id"]: m for m in o["messages"]}
    assert all(m["parent"] is None or m["parent"] in by_id for m in o["messages"]) and o["leaf"] in by_id
    answer = by_id[chats.first["message_id"]]
    assert answer["ids_hash"] == chats.first["ids_hash"] and answer["params"]["seed"] == 3 and answer["thinking"] == "hm"
    assert answer["usage"] == chats.first["usage"] and answer["build"]["fingerprint"] == "f" * 64
    assert answer["ids"][-1] == 257 and bytes(answer["body_ids"]).decode() == "first answer"
    assert json.loads(program("conversations", "export", chats.one, "--json").out) == o
    many = json.loads(program("conversations", "export", "--all", "--format", "json").out)
    assert [c["id"] for c in many] == [chats.two, chats.one]


def test_export_other_formats(program, chats, tmp_path):
    md = program("conversations", "export", chats.one).out
    assert md.startswith("# What is an n-gram?\n") and "## You" in md and "## nano" in md and "seed 3" in md
    rows = [json.loads(line) for line in program("conversations", "export", chats.one, "--format", "jsonl").out.splitlines()]
    assert len(rows) == 6 and {row["conversation"] for row in rows} == {chats.one}
    assert "first answer" in program("conversations", "export", chats.one, "--format", "text").out
    path = tmp_path / "out.md"
    assert program("conversations", "export", chats.one, "-o", str(path)).out == "" and path.read_text() == md
    assert program("conversations", "export", chats.one, "-o", str(path)).code == 2
    assert program("conversations", "export", chats.one, "-o", str(path), "--force").code == 0
    assert program("conversations", "export").code == program("conversations", "export", chats.one, "--all").code == 2


def test_rename_delete_undelete(program, chats):
    assert program("conversations", "rename", chats.two, "New name").code == 0
    assert program("conversations", "show", "New name", "--json").object["id"] == chats.two
    refused = program("conversations", "delete", chats.two, stdin="")
    assert refused.code == 2 and "--yes" in refused.err
    assert program("conversations", "delete", chats.two, chats.one, "--yes", "--json").object == {"ok": True, "ids": [chats.two, chats.one]}
    assert program("conversations", "list", "--json").object == []
    assert len(program("conversations", "list", "--archived", "--json").object) == 2
    assert program("conversations", "undelete", chats.two[:5]).code == 0
    assert [row["id"] for row in program("conversations", "list", "--json").object] == [chats.two]


def test_delete_asks_on_a_terminal(program, chats, monkeypatch):
    import io

    for answer, left in (("n\n", 2), ("y\n", 1)):
        monkeypatch.setattr("sys.stdin", type("Keys", (io.StringIO,), {"isatty": lambda self: True})(answer))
        from dsv41chat.cli_commands import run_command

        assert run_command("conversations", ["--data-dir", str(program.data), "delete", chats.two]) == 0
        assert len(program("conversations", "list", "--json").object) == left


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["show", "abcd"], 6), (["show", "abcd", "--json"], 6), (["export", "abcd"], 6), (["rename", "abcd", "x"], 6),
        (["delete", "abcd", "--yes"], 6), (["undelete", "abcd"], 6), (["shw", "abcd"], 2), ([], 2), (["show"], 2),
        (["list", "--limit", "0"], 2), (["list", "--lmit", "1"], 2),
        (["show", "a", "b"], 2), (["export", "x", "--format", "pdf"], 2), (["show", "x", "--tree", "--branch", "y"], 2),
    ],
)  # fmt: skip
def test_conversation_errors(program, argv, code):
    result = program("conversations", *argv)
    assert result.code == code
    if "--json" in argv:
        assert result.object["type"] == "error" and result.object["exit_code"] == code
    else:
        assert result.out == "" and result.err.startswith("dsv41chat: ")


def test_near_matches_of_commands_and_options(program):
    assert "did you mean show?" in program("conversations", "shw", "x").err
    assert "--limit" in program("conversations", "list", "--lmit", "1").err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("conversation list", "conversations list"), ("model info nano", "models info"), ("conversation export --all", "conversations export"),
        ("-q config1 show", "config show"), ("caches stats --json", "cache stats"),
    ],
)  # fmt: skip
def test_a_command_that_is_nearly_one_is_no_prompt(program, words, meant):
    result = program(*words.split())
    command = meant.split()[0]
    assert result.code == 2 and f"(did you mean {command}?)" in result.err + result.out and f"dsv41chat {meant}" in result.err + result.out
    assert program("--headless", words.split()[0 if words[0] != "-" else 1]).code == 0, "alone it is a prompt"
    assert "put the prompt in quotes" in program("model", "ship").err and program("model ship", "--headless").code == 0
    assert program("--headless", "-s", "model", "list").code == 0, "the value of an option and a prompt"


# models ------------------------------------------------------------------------------------------------------------------


def folder(tmp_path, name="V4.1 Flash"):
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_models_list_info_add_remove(program, tmp_path):
    path = folder(tmp_path)
    added = program("models", "add", str(path), "--json").object
    assert (added["name"], added["folder"], added["fingerprint"]) == ("V4.1-Flash", str(path), "f" * 64)
    rows = program("models", "list", "--json").object
    assert [(row["name"], row["embedded"], row["registered"]) for row in rows] == [("V4.1-Flash", False, True), ("nano", True, False)]
    assert "V4.1-Flash" in program("models", "list").out
    for name in ("V4.1-Flash", "V4", str(path)):
        assert program("models", "info", name, "--json").object["name"] == "V4.1-Flash"
    assert "fingerprint" in program("models", "info", "nano").out
    assert program("models", "remove", "V4.1-Flash").code == 0 and (path / "config.json").exists()
    assert [row["name"] for row in program("models", "list", "--json").object] == ["nano"]


def test_model_names_and_folders_of_the_config(program, tmp_path, monkeypatch):
    path = folder(tmp_path, "a")
    assert program("models", "add", str(path), "--name", "mine", "--json").object["name"] == "mine"
    parent = tmp_path / "models"
    parent.mkdir()
    folder(parent, "mine")
    folder(parent, "mint")
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL_DIRS", str(parent))
    assert [row["name"] for row in program("models", "list", "--json").object] == ["mine", "mine-2", "mint", "nano"]
    ambiguous = program("models", "info", "mi", "--json")
    assert ambiguous.code == 4 and ambiguous.object["code"] == "ambiguous" and "mine-2" in ambiguous.object["message"]
    chat = program("--json", "-m", "mi", "hi")
    assert (chat.code, chat.object["code"], chat.object["exit_code"]) == (4, "ambiguous", 4)


def test_which_build_answers(program, tmp_path, monkeypatch):
    """The conversation's, else engine.model, else the last used one, else the embedded one."""
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    assert program("--json", "hi").object["build"]["name"] == "nano"
    kept = program("--json", "-m", str(one), "hi").object
    assert kept["build"]["name"] == "one"
    assert program("--json", "hi").object["build"]["name"] == "one", "last used"
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL", str(two))
    assert program("--json", "hi").object["build"]["name"] == "two"
    assert program("--json", "--resume", kept["conversation"], "hi").object["build"]["name"] == "one"
    assert program("--json", "--resume", kept["conversation"], "-m", "nano", "hi").object["build"]["name"] == "nano"
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL", "gone")
    assert program("--json", "hi").code == 4


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["info", "nothing"], 4), (["add", "/nonexistent"], 4), (["remove", "nothing"], 4), (["remove", "nano"], 2), (["verify", "nothing"], 4),
        (["verify", "nano", "--goldens", "/nonexistent"], 2), (["verify", "nano", "--atol", "0"], 2), (["verify", "nano", "--chunks", "0"], 2),
        (["verify"], 2), (["convert", "nano"], 2), (["convert", "nano", "/tmp/x", "--recipe", "q9"], 2),
        (["convert", "nano", "/tmp/x", "--recipe", "drafter-bank"], 2), (["convert", "nano", "/tmp/x", "--recipe", "native", "--from", "nano"], 2),
    ],
)  # fmt: skip
def test_model_errors(program, argv, code):
    result = program("models", *argv, "--json")
    assert result.code == code and result.object["exit_code"] == code


def test_a_broken_build_is_listed_with_its_reason(program, tmp_path, monkeypatch):
    folder(tmp_path, "broken")
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL_DIRS", str(tmp_path))

    def probe(self, ref, original=EngineHost.probe):
        if ref.name == "broken":
            raise PackIncomplete("3 of 61 shards are missing")
        return original(self, ref)

    monkeypatch.setattr(EngineHost, "probe", probe)
    result = program("models", "list")
    assert result.code == 0 and "! broken" in result.out and "3 of 61 shards" in result.out


# config ------------------------------------------------------------------------------------------------------------------


def test_config(program, tmp_path):
    path = tmp_path / "c" / "config.toml"
    words = ["--config", str(path)]
    assert program("config", "path", *words).out == f"{path}\n"
    assert program("config", "init", *words).code == 0 and path.exists()
    assert program("config", "init", *words).code == 3
    assert program("config", "set", "chat.effort", "low", *words).code == 0
    shown = program("config", "show", *words, "--json").object
    assert set(KEYS) == set(shown) and shown["chat.effort"] == "low"
    assert program("config", "show", "--origin", *words, "--json").object["chat.effort"] == {"value": "low", "origin": "file"}
    table = program("config", "show", "--origin", *words)
    assert 'file     chat.effort = "low"' in table.out and "a build's own defaults" in table.err and "build" not in table.out.split()
    assert 'chat.effort = "low"' in program("config", "show", *words).out.splitlines()
    assert program("config", "set", "chat.efort", "low", *words).code == 3
    assert program("config", "set", "chat.effort", "most", *words).code == 3
    for key in KEYS.values():
        if key.inert:
            default = str(key.default).lower() if isinstance(key.default, bool) else str(key.default)
            assert "no effect" in program("config", "set", key.name, default, *words).err


def test_config_get_and_unset(program, tmp_path):
    path = tmp_path / "config.toml"
    chat = '# mine\n[chat]\neffort = "low"  # gone with its line\ntemperature = 0.5\n'
    path.write_text(chat + '[engine]\nmodel_dirs = [\n  "a",\n]\n[keys]\n"chat.new" = "f9"\n')
    words = ["--config", str(path)]
    assert program("config", "get", "chat.effort", *words).out == '"low"\n'
    assert program("config", "get", "chat.effort", "--json", *words).object == {"key": "chat.effort", "value": "low", "origin": "file"}
    assert program("config", "get", "keys.chat.new", *words).out == '"f9"\n'
    said = program("config", "set", "chat.temperature", "0.7", *words)
    assert f"chat.temperature = 0.7 in {path}" in said.err and said.out == ""
    for key in ("chat.effort", "engine.model_dirs", "keys.chat.new"):
        assert program("config", "unset", key, *words).code == 0
    assert path.read_text() == "# mine\n[chat]\ntemperature = 0.7\n"
    program("config", "set", "chat.effort", "off", *words)
    assert '"high" counts again' in program("config", "unset", "chat.effort", *words).err
    assert program("config", "unset", "chat.effort", "--json", *words).object == {"path": str(path), "key": "chat.effort", "removed": False}
    assert program("config", "get", "chat.effort", *words).out == '"high"\n'
    assert program("config", "unset", "chat.efort", *words).code == program("config", "get", "chat.efort", *words).code == 3


def test_config_says_what_is_still_wrong(program, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[chat]\ntemperature = "hot"\n[ui]\nburst_paste = 3\n')
    words = ["--config", str(path)]
    shown = program("conversations", "list", *words)
    assert shown.code == 3 and f"Try: dsv41chat config unset chat.temperature --config {path}" in shown.err
    said = program("config", "set", "chat.temperature", "0.5", *words)
    assert said.code == 0 and "still wrong in it: line 4: ui.burst_paste must be true or false, not 3" in said.err
    said = program("config", "unset", "ui.burst_paste", *words)
    assert said.code == 0 and "still wrong" not in said.err and program("conversations", "list", *words).code == 0


def test_a_wrong_variable_is_mended_by_another_command(program, monkeypatch):
    monkeypatch.setenv("DSV41CHAT_CHAT_TEMPERATURE", "x")
    result = program("config", "show", "--origin")
    assert result.code == 3 and result.err.endswith("Try: unset DSV41CHAT_CHAT_TEMPERATURE\n")


def test_a_broken_file_can_still_be_found(program, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[chat")
    assert program("config", "path", "--config", str(path)).out == f"{path}\n"
    result = program("config", "show", "--config", str(path), "--json")
    assert (result.code, result.object["code"], result.object["hint"]) == (3, "config", f"an editor on {path}")


# what every command shares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["conversations"], ["conversations", "list"], ["models", "verify"], ["config", "set"]])
def test_help_has_an_example(program, capsys, argv):
    with pytest.raises(SystemExit) as exit:
        program(*argv, "-h")
    assert exit.value.code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_copied(command):
    """argparse fills in option helps, where %% is a percent sign, but not the text below them."""
    parser, subcommands = command_parser(command)
    for name, one in {"": parser, **subcommands.choices}.items():
        assert "%%" not in one.format_help(), f"{command} {name}"


def test_version(program):
    with pytest.raises(SystemExit) as exit:
        program("--version")
    assert exit.value.code == 0


def test_commands_work_without_a_back_end(program, monkeypatch):
    program("--headless", "hi")
    monkeypatch.setitem(__import__("sys").modules, "mlx.core", None)
    monkeypatch.setitem(__import__("sys").modules, "mlx", None)
    assert program("conversations", "list", real=True).code == 0
    assert program("conversations", "export", "hi", real=True).code == 0
    assert program("config", "show", real=True).code == 0
    assert program("models", "list", real=True).code == 0


def test_a_read_only_data_folder_can_be_read(program):
    one = program("--json", "hi").object["conversation"]
    for path in (*program.data.iterdir(), program.data):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert program("conversations", "show", one).code == 0
    finally:
        program.data.chmod(0o700)


@pytest.mark.parametrize("argv", [["-m", "nano", "conversations", "list"], ["--temperature=1", "models", "list"], ["-c", "--json", "config", "show"]])
def test_chat_options_before_a_command_are_refused_by_name(program, argv):
    result = program(*argv)
    option = argv[0].partition("=")[0]
    assert result.code == 2 and f"{option} belongs to the chat, not to the command" in result.err + result.out
    assert program("-q", "--json", "conversations", "list").object == []


def test_an_unknown_option_names_no_option_that_only_shares_its_no(program):
    assert program("--nosuch", "hi").err.startswith("dsv41chat: Unknown option --nosuch.")
    assert "did you mean --no-cache" in program("--no-cach", "hi").err


@pytest.mark.parametrize("option", ["--data-dir", "--config", "--log-file"])
def test_an_empty_place_is_refused(program, option):
    for words in (["conversations", "list"], ["--headless", "hi"]):
        result = program(*words, f"{option}=")
        assert result.code == 2 and f"{option}: must not be empty" in result.err


def test_a_conversation_in_the_place_of_a_message_is_named_as_one(program):
    made = program("--json", "hi").object
    result = program("--headless", "--branch", made["conversation"], "more")
    assert result.code == 6 and f"'{made['conversation']}' is a conversation; the id of a message is wanted." in result.err
    assert f"Try: dsv41chat conversations show {made['conversation']} --tree" in result.err
    assert made["message_id"] in program("conversations", "show", made["conversation"], "--tree").out
    assert "Try: the id of a message: dsv41chat conversations show ID --tree" in program("--headless", "--branch", "abcdef", "more").err


def test_binary_data_from_a_pipe_is_refused_as_such(program, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"a\0b")
    for data in (b"a\0b", b"\x89PNG\r\n\x1a\n\x01\x02"):
        result = program("--headless", "what is it", stdin=data)
        assert result.code == 2 and "Standard input is not text" in result.err and "Try: pipe text" in result.err
    assert "Try: choose a text file" in program("--headless", "-f", str(tmp_path / "data.bin"), "what is it").err


def test_errors_are_sentences(program):
    assert program("conversations", "show", "zzzz").err.startswith("dsv41chat: There is no conversation 'zzzz'.  Try: dsv41chat conversations list")


def test_a_value_of_the_wrong_kind_is_named_by_its_option(program):
    said = program("cache", "prune", "--older-than", "banana").err
    assert "Argument --older-than: 'banana' cannot be read as D (not used for this long: 12h, 30d, 4w)." in said and "_age" not in said
    assert "Argument --experts: 'x' cannot be read as N (routed experts to keep per layer: a number, or a share such as 75%)." in program(
        "models", "prune", "a", "b", "--experts", "x"
    ).err  # fmt: skip


def test_add_says_whether_the_folder_is_there(program, tmp_path):
    assert "does not exist" in program("models", "add", str(tmp_path / "none")).err
    (tmp_path / "file").touch()
    assert "is not a folder" in program("models", "add", str(tmp_path / "file")).err
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in program("models", "add", str(tmp_path / "empty")).err


def test_verify_says_that_contents_were_not_read(program, monkeypatch):
    from dsv41chat.engine.verify import Found

    monkeypatch.setattr("dsv41chat.engine.verify_plain", lambda folder, cache_dir: [Found("shards", "3 files")])
    monkeypatch.setattr("dsv41chat.engine.verify_full", lambda folder, **options: [Found("checksums", "3 files")])
    assert "not read: --full reads every byte" in program("models", "verify", "nano").out
    assert program("models", "verify", "nano", "--json").object["contents"] == "not read"
    full = program("models", "verify", "nano", "--full")
    assert "not read" not in full.out and "checksums  ok   3 files" in full.out
    monkeypatch.setattr("dsv41chat.engine.verify_full", lambda folder, **options: [Found("checksums", "not compared", checked=False)])
    assert "checksums  -    not compared" in program("models", "verify", "nano", "--full").out
    found = program("models", "verify", "nano", "--full", "--json").object
    assert found["ok"] and [check["ok"] for check in found["checks"]] == [True, None]


def test_add_says_what_becomes_the_default_and_what_cannot_chat(program, tmp_path, monkeypatch):
    path = folder(tmp_path)
    broken = program("models", "add", str(path))
    assert broken.code == 0 and "cannot" not in broken.out and "can be verified, not talked to" in broken.err
    assert program("models", "add", str(path), "--json").object["can_chat"] is False
    (path / "tokenizer.json").write_text("{")
    assert program("models", "add", str(path), "--json").object["can_chat"] is False
    monkeypatch.setattr(EngineHost, "load_tokenizer", lambda self, ref: object())
    assert "once it has answered it is the default" in program("models", "add", str(path)).err
    monkeypatch.setenv("DSV41CHAT_ENGINE_MODEL", "nano")
    assert "engine.model = nano still answers" in program("models", "add", str(path)).err


def test_a_theme_that_is_not_there_is_refused(program, tmp_path):
    words = ["--config", str(tmp_path / "c.toml")]
    refused = program("config", "set", "ui.theme", "lihgt", *words)
    assert refused.code == 3 and "did you mean light" in refused.err and not (tmp_path / "c.toml").exists()
    for name in ("auto", "light", "ansi", "nord"):
        assert program("config", "set", "ui.theme", name, *words).code == 0


def test_undelete_of_a_conversation_that_is_there_says_so(program, chats):
    result = program("conversations", "undelete", chats.one)
    assert result.code == 2 and "is not deleted" in result.err and f"show {chats.one}" in result.err
    gone = program("conversations", "undelete", "zzzz")
    assert gone.code == 6 and "Try: dsv41chat conversations list\n" in gone.err


# import ------------------------------------------------------------------------------------------------------------------


def exported(program, ref: str, **changes) -> dict:
    return json.loads(program("conversations", "export", ref, "--json").out) | changes


def test_an_import_is_told_in_words(program, tmp_path):
    program("--json", "It's \\ here", script=Script(load_error=PackIncomplete("no")))
    file = tmp_path / "all.json"
    file.write_text(program("conversations", "export", "--all", "--json").out)
    result = program.at(tmp_path / "elsewhere")("conversations", "import", str(file))
    assert result.code == 0 and """ "It's \\ here", 1 message\n""" in result.err


def test_import_brings_the_whole_tree_back(program, chats, tmp_path, monkeypatch):
    program("conversations", "rename", chats.two, "A title of mine")
    program("-c", "--json", "--system", "Be brief.", "--fork", "again")
    everything = program("conversations", "export", "--all", "--json").out
    file = tmp_path / "all.json"
    file.write_text(everything)
    other = program.at(tmp_path / "elsewhere")
    result = other("conversations", "import", str(file))
    assert (result.code, result.out) == (0, "") and f'imported {chats.one} "What is an n-gram?", 6 messages\n' in result.err
    assert other("conversations", "export", "--all", "--json").out == everything, "the same bytes come out again"
    # It is a conversation like any other: found by its words, gone on with, renamed by its first message.
    assert [row["id"] for row in other("conversations", "list", "--search", "branch one", "--json").object] == [chats.one]
    turn = other("--json", "--resume", chats.one, "and now?", script=Script("fine")).object
    assert turn["text"] == "fine" and bytes(i for i in other.script_ids() if i < 256).count(b"first answer") == 1
    assert other("conversations", "rename", chats.two, "").code == 0
    assert "second chat" in other("conversations", "list").out


def test_a_message_that_was_taken_back_is_counted_nowhere(program, tmp_path):
    """Its text is in the composer: list, tree, show, export and what an import of that says go by one rule; nothing is lost."""
    with Store.open(program.data) as store:
        key = store.new_conversation().id
        question = store.add_message(key, None, "user", "define gravity")
        answer = store.add_message(key, question.id, "assistant", "a force")
        back = store.add_message(key, answer.id, "user", "define lake")
        store.save_draft(key, "define lake", editing=back.id)
    command = lambda at, *words: at("conversations", *words)
    assert command(program, "list", "--json").object[0]["messages"] == 2
    tree = command(program, "show", key, "--tree").out.splitlines()
    assert [line[0] for line in tree[1:]] == ["*", "*", " "] and tree[3].endswith("user: define lake  (taken back)")
    assert "define lake" not in command(program, "show", key).out + command(program, "export", key).out
    assert len(command(program, "show", key, "--json").object["messages"]) == 2
    file, other = tmp_path / "one.json", program.at(tmp_path / "elsewhere")
    assert command(program, "export", key, "--format", "json", "-o", str(file)).code == 0
    exported = json.loads(file.read_text())
    assert exported["leaf"] == answer.id and [m["text"] for m in exported["messages"]] == ["define gravity", "a force", "define lake"]
    assert f'imported {key} "define gravity", 2 messages\n' in command(other, "import", str(file)).err
    assert command(other, "list", "--json").object[0]["messages"] == 2
    assert command(other, "show", key, "--tree").out.splitlines() == tree
    assert json.loads(command(other, "export", key, "--format", "json").out) == exported


def test_a_conversation_that_shows_no_branch_is_imported_so(program, tmp_path):
    """Its only message was taken back: it is there, and not what the next one goes on from."""
    with Store.open(program.data) as store:
        key = store.new_conversation().id
        store.add_message(key, None, "user", "far too long")
        store.set_leaf(key, None)
    exported = program("conversations", "export", key, "--json").out
    assert json.loads(exported)["leaf"] is None
    other = program.at(tmp_path / "elsewhere")
    assert '"far too long", 0 messages\n' in other("conversations", "import", "-", stdin=exported).err
    assert other("conversations", "export", key, "--json").out == exported
    copy = program("conversations", "import", "-", "--json", stdin=exported).object["conversations"][0]["id"]
    assert json.loads(program("conversations", "export", copy, "--json").out)["leaf"] is None


def test_import_overwrites_nothing(program, chats):
    before = exported(program, chats.one)
    result = program("conversations", "import", "-", "--json", stdin=json.dumps(before))
    (row,) = result.object["conversations"]
    assert row["id"] != chats.one == row["exported_id"] and row["messages"] == 6
    assert exported(program, chats.one) == before
    copy = exported(program, row["id"])
    assert [m["text"] for m in copy["messages"]] == [m["text"] for m in before["messages"]]
    assert not {m["id"] for m in copy["messages"]} & {m["id"] for m in before["messages"]}
    shape = lambda o: [[m["id"] for m in o["messages"]].index(m["parent"]) if m["parent"] else None for m in o["messages"]]
    assert shape(copy) == shape(before)
    assert "a copy: the id" in program("conversations", "import", "-", stdin=json.dumps(before)).err
    # A deleted one is still there, and stays as it is.
    program("conversations", "delete", chats.two, "--yes")
    two = exported(program, row["id"], id=chats.two, messages=[], leaf=None)
    assert program("conversations", "import", "-", "--json", stdin=json.dumps(two)).object["conversations"][0]["id"] != chats.two


DAMAGED = {
    "cut": (lambda o: json.dumps(o)[:-40], "is no JSON"),
    "another program": (lambda o: '{"mapping": {}, "title": "x"}', "is no conversation that dsv41chat exported"),
    "a number": (lambda o: "7", "is no conversation"),
    "nothing": (lambda o: "[]", "holds no conversation"),
    "twice": (lambda o: json.dumps([o, o]), "one conversation twice"),
    "newer": (lambda o: json.dumps(o | {"v": 2, "version": "9.0"}), "$.v is 2 (dsv41chat 9.0); this version reads 1"),
    "jsonl": (lambda o: "\n".join(json.dumps({"conversation": o["id"], **m}) for m in o["messages"]), "is a jsonl export"),
    "leaf": (lambda o: json.dumps(o | {"leaf": "abcdef"}), "$.leaf is 'abcdef', which is none of the messages"),
    "order": (lambda o: json.dumps(o | {"messages": o["messages"][::-1]}), "is none of the messages before it"),
    "same id": (lambda o: json.dumps(o | {"messages": [o["messages"][0], *o["messages"]]}), "$.messages[1].id"),
    "role": (lambda o: json.dumps(_changed(o, 0, role="tool_use")), "$.messages[0].role must be one of"),
    "state": (lambda o: json.dumps(_changed(o, 1, state=None)), "$.messages[1].state must be a text"),
    "text": (lambda o: json.dumps(_changed(o, 1, text=["a"])), "$.messages[1].text must be a text"),
    "id": (lambda o: json.dumps(_changed(o, 1, id="../x")), "$.messages[1].id must be an id in hex digits"),
    "ids": (lambda o: json.dumps(_changed(o, 1, body_ids=[-1])), "$.messages[1].body_ids must be a list of token ids"),
    "bit rot": (lambda o: json.dumps(_changed(o, 1, ids=[1, 2])), "do not have the hash"),
    "time": (lambda o: json.dumps(o | {"created": 10**400}), "$.created must be a time"),
    "infinite": (lambda o: json.dumps(o | {"updated": float("inf")}), "is no JSON number"),
    "half a pair": (lambda o: json.dumps(o | {"title": "\ud800"}), r"holds half of a surrogate pair (\ud800), which is no character."),
    "settings": (lambda o: json.dumps(o | {"settings": {"temperature": "hot"}}), "$.settings.temperature must be a number"),
    "system": (lambda o: json.dumps(o | {"settings": {"system": 3}}), "$.settings.system must be a text"),
    "origin": (lambda o: json.dumps(o | {"settings": {"origin": {"defaults": 3}}}), "$.settings.origin.defaults must be an object"),
    "usage": (lambda o: json.dumps(_changed(o, 1, usage={"context_used": "many"})), "$.messages[1].usage.context_used must be a number, not 'many'"),
    "timing": (lambda o: json.dumps(_changed(o, 1, timing={"decode_s": -1})), "$.messages[1].timing.decode_s must be a number"),
    "seed": (lambda o: json.dumps(_changed(o, 1, params={"seed": [1]})), "$.messages[1].params.seed must be a number, not [1]"),
    "effort": (lambda o: json.dumps(_changed(o, 1, params={"effort": {}})), "$.messages[1].params.effort must be a number or a text, not {}"),
    "deep": (lambda o: "[" * 100_000, "is no JSON"),
}


def _changed(o: dict, number: int, **fields) -> dict:
    return o | {"messages": [m | fields if i == number else m for i, m in enumerate(o["messages"])]}


@pytest.mark.parametrize("damage", DAMAGED)
def test_import_refuses_what_is_foreign_or_damaged(program, chats, tmp_path, damage):
    make, said = DAMAGED[damage]
    good = exported(program, chats.two)
    file = tmp_path / "chat.json"
    file.write_text(make(good))
    before = program("conversations", "export", "--all", "--json").out
    result = program("conversations", "import", str(file), "--json")
    error = result.object
    assert result.code == error["exit_code"] == 2 and error["code"] == "usage" and said in error["message"] and error["hint"]
    # One bad conversation keeps the good ones of its file out too: all or nothing.
    if damage not in ("cut", "jsonl", "deep", "half a pair", "infinite"):
        file.write_text(json.dumps([good | {"id": "0123abcd"}, *([bad] if not isinstance(bad := json.loads(make(good)), list) else bad)]))
        if damage != "nothing":
            assert program("conversations", "import", str(file)).code == 2
    assert program("conversations", "export", "--all", "--json").out == before


def test_an_imported_answer_with_few_figures_has_a_page_of_its_own(program, chats):
    from dsv41chat.ui.details import details_text

    file = json.dumps(_changed(exported(program, chats.two), 1, usage={"context_used": 1500, "cached_tokens": None}, timing={}))
    (row,) = program("conversations", "import", "-", "--json", stdin=file).object["conversations"]
    with Store.open(program.data, readonly=True) as store:
        answer = next(m for m in store.tree(row["id"]) if m.role == "assistant")
    assert answer.usage == {"context_used": 1500} and "1,500 of 0" in details_text(answer)


def test_import_of_files_that_cannot_be_read(program, tmp_path):
    assert program("conversations", "import", str(tmp_path / "none.json")).code == 2
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xe9"}')
    assert "is not valid UTF-8 (byte 11: 0xe9)" in program("conversations", "import", str(tmp_path / "latin.json")).err
    assert "needs piped input" in program("conversations", "import", "-").err


# fits --------------------------------------------------------------------------------------------------------------------


def test_models_fits(program, monkeypatch):
    monkeypatch.setattr("dsv41chat.cli_fits.RECIPES", ("native", "mixed-2.4"))
    monkeypatch.setattr("dsv41chat.engine.paper.RELEASES", {"V4-Flash": V4_FLASH})
    rows = {row["recipe"]: row for row in program("models", "fits", "--mac", "256", "--json").object}
    assert rows["native"]["fits"] == "fits" and rows["native"]["context"] == 1 << 20 and not rows["native"]["wired_limit"]
    assert "weights 156.9 GB" in rows["native"]["words"]
    monkeypatch.setattr("dsv41chat.cli_fits._SAY_S", 0.0)
    said = program("models", "fits", "--mac", "128")
    table = said.out.splitlines()
    assert "laid out 1 of" in said.err and "laid out" not in said.out
    assert table[0].split() == ["release", "recipe", "disk", "memory", "fits", "context"]
    assert table[1].split()[:2] == ["V4-Flash", "native"] and "does not fit" in table[1] and "with a raised wired limit" in table[2]
    for words in (["--mac", "7"], ["--mac", "x"], ["--markdown", "--json"]):
        assert program("models", "fits", *words).code == 2
