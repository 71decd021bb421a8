"""A data folder that is none: every command that reads from it says so in one line, and none takes a file for an empty folder."""

from __future__ import annotations

import json
import shlex

import pytest

READERS = (
    "conversations list", "conversations search x", "conversations show abcd", "conversations export --all", "conversations rename abcd x",
    "conversations delete abcd --yes", "conversations undelete abcd", "cache stats", "cache list", "cache prune --all",
    "cache prune --older-than 30d --dry-run", "models list", "models info nano", "models verify nano", "models remove x",
    "eval report nano", "doctor states", "doctor engram", "doctor drafting", "--headless hi", "--headless --no-save hi",
)  # fmt: skip


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("words", READERS)
def test_a_file_is_no_empty_data_folder(program, tmp_path, words, below):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    result = program.at(file / "data" if below else file)(*shlex.split(words))
    assert (result.code, result.out) == (8, "")
    line = f"dsv41chat: {file} is not a folder  Try: move it aside, or choose another folder with --data-dir\n"
    assert result.err == line
    assert file.read_text() == "mine"


def test_it_is_one_object_for_scripts(program, tmp_path):
    (tmp_path / "file").write_text("")
    error = program.at(tmp_path / "file")("conversations", "list", "--json").object
    assert (error["type"], error["code"], error["exit_code"]) == ("error", "store", 8) and "is not a folder" in error["message"]


def test_a_data_folder_that_is_not_there_yet_is_empty(program, tmp_path):
    new = program.at(tmp_path / "new")
    for words, said in ((("conversations", "list"), "no conversations"), (("cache", "list"), "no stored states")):
        result = new(*words)
        assert (result.code, result.out) == (0, "") and said in result.err
    assert json.loads(new("cache", "stats", "--json").out)["entries"] == 0


def test_what_needs_no_data_folder_works_beside_a_file(program, tmp_path):
    (tmp_path / "file").write_text("")
    at = program.at(tmp_path / "file")
    assert at("config", "get", "chat.effort").code == 0
    doctor = at("doctor", "--json")
    assert doctor.code == 1 and "is not a folder" in doctor.out


def test_a_folder_of_states_that_is_a_file(program, tmp_path, monkeypatch):
    """Conversations are listed without them; the commands about states say what is wrong."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSV41CHAT_CACHE_DIR", str(tmp_path / "file"))
    assert program("conversations", "list").code == 0
    result = program("cache", "stats")
    assert result.code == 8 and f"{tmp_path / 'file'} is not a folder" in result.err
