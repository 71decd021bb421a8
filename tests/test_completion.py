"""`completion`: the words come from the parsers; the bash script works in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


def words(program, *line: str) -> list[str]:
    return program("completion", "words", "--", *line).out.splitlines()


def test_commands_subcommands_and_options(program):
    assert words(program, "con") == ["config", "conversations"] and "doctor" in words(program, "")
    assert words(program, "models", "re") == ["remove"] and words(program, "-q", "doctor", "en") == ["engram"]
    assert words(program, "--temp") == ["--temperature"] and "--top-k" in words(program, "--")
    assert words(program, "conversations", "list", "--lim") == ["--limit"] and words(program, "models", "verify", "nano", "--js") == ["--json"]
    assert words(program, "--effort", "m") == ["max"] and words(program, "conversations", "export", "x", "--format", "js") == ["json", "jsonl"]
    assert words(program, "--theme", "hi") == ["high-contrast"] and words(program, "config", "set", "chat.eff") == ["chat.effort"]
    assert words(program, "a prompt", "con") == [] == words(program, "-f", "no"), "file names are the shell's"


def test_builds_and_conversations(program, tmp_path):
    one, two = (program("--json", text).object["conversation"] for text in ("first", "second"))
    assert words(program, "-m", "na") == ["nano"] == words(program, "models", "info", "") == words(program, "doctor", "engram", "--model", "n")
    assert words(program, "eval", "ppl", "") == ["nano"] == words(program, "eval", "report", "n")
    assert words(program, "eval", "ppl", "--dt") == ["--dtype"] and "ladder" in words(program, "eval", "")
    assert words(program, "--resume", one[:6]) == [one] and words(program, "conversations", "show", "") == sorted([one, two])
    program("conversations", "delete", one, "--yes")
    assert words(program, "conversations", "undelete", "") == [one] and words(program, "conversations", "delete", "") == [two]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(program, shell):
    script = program("completion", shell).out
    assert "completion words --" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0
    assert program("completion", "tcsh").code == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dsv41chat"])
    script = program("completion", "bash").out
    tool = tmp_path / "dsv41chat"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsv41chat "$@"\n')
    tool.chmod(0o755)
    ask = script + 'COMP_WORDS=(dsv41chat models ""); COMP_CWORD=2; _dsv41chat; printf "%s\\n" "${COMPREPLY[@]}"'
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", ask], text=True, capture_output=True, env={**os.environ, "PATH": path})
    assert {"add", "info", "list", "remove", "verify"} <= set(done.stdout.split())
