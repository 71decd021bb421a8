"""What the README claims that a test can hold: its table, its commands, its picture."""

from __future__ import annotations

import re
import shlex
import signal
import xml.etree.ElementTree as ElementTree
from html import unescape

from dsv41chat.bench.screenshot import PICTURE, QUESTIONS, draw
from dsv41chat.cli_commands import _parse, _refuse_chat_options
from dsv41chat.cli_fits import BEGIN, END, markdown
from dsv41chat.cli_options import COMMANDS, chat_parser, first_word, parse_chat
from dsv41chat.engine import probe_pack
from dsv41chat.nano import embedded_pack
from dsv41chat.ui.headless import READER_GONE, STRICT_CODES, STRICT_NO_BLOCK
from dsv41chat.ui.interrupts import TIMED_OUT
from dsv41chat.ui.turn_events import EXIT_CODES
from dsv41chat.ui.units import size
from tests.ui.program import ROOT

README = (ROOT / "README.md").read_text("utf-8")
SET_UP = (
    "python3 -m venv .venv && .venv/bin/python -m pip install -q '.[cpu]' && .venv/bin/dsv41chat",
    "python3 -m venv .venv && .venv/bin/python -m pip install -q -e '.[cpu,test]' && .venv/bin/python -m ruff check dsv41chat tests"
    " && .venv/bin/python -m pytest -n auto --dist loadfile",
)
SIDEBAR_X = 370.0


def test_the_table_of_machines_is_what_the_admission_says():
    shown = README.split(BEGIN)[1].split(END)[0].strip()
    assert shown == markdown().strip(), "dsv41chat models fits --markdown"


def test_every_command_of_the_readme_is_one():
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    lines = [line.split(" # ")[0].split(" | dsv41chat")[-1] for line in blocks.splitlines() if "dsv41chat" in line and "venv" not in line]
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(line.removeprefix("dsv41chat"))
        index = first_word(words, chat_parser())
        if index is not None and words[index] in COMMANDS:
            _refuse_chat_options(words[index], words[:index])
            _parse(words[index], words[:index] + words[index + 1 :])
        else:
            parse_chat(words)


def test_the_exit_codes_are_those_of_the_program():
    """A signal that has a handler ends with 128 and its number; from one that has none the shell makes the same."""
    sentence = re.search(r"Exit codes: (.*?)\. `dsv41chat --help`", README, re.DOTALL)[1].replace("head -1", "")
    said = {int(code) for code in re.findall(r"\b\d+\b", sentence)}
    named = {*EXIT_CODES.values(), *STRICT_CODES.values(), STRICT_NO_BLOCK, TIMED_OUT, READER_GONE, 0, 1, 9}
    signals = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)}
    assert said == named | signals


def test_the_two_lines_that_set_it_up():
    for line in SET_UP:
        assert f"```sh\n{line}\n```" in README


def test_the_embedded_model_has_one_size():
    """README, the model's card and `models list` say the same megabytes: those of its shards."""
    said = size(probe_pack(embedded_pack()).bytes)
    card = (embedded_pack() / "MODEL_CARD.md").read_text("utf-8")
    for text in (README, card):
        assert re.findall(r"million weights[^.]*?\(?([\d.]+ MB)\)", text) == [said]


async def test_the_picture_is_what_the_screen_shows(tmp_path):
    """Made by `python -m dsv41chat.bench.screenshot`: the questions and answers of the stored picture are those of the embedded model now."""
    picture, answers = await draw(tmp_path)
    assert len(answers) == len(QUESTIONS)
    stored = PICTURE.read_text("utf-8")
    for text in (*QUESTIONS, *answers):
        assert squeezed(text) in squeezed(transcript(stored)) and squeezed(text) in squeezed(transcript(picture))
    assert all(word in transcript(stored) for word in ("tok/s", "resumed", "prefilled"))
    ElementTree.fromstring(PICTURE.read_text("utf-8"))
    assert f"]({PICTURE.relative_to(ROOT)})" in README


def transcript(svg: str) -> str:
    """The words right of the sidebar, row by row."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        if float(x) > SIDEBAR_X:
            rows.setdefault(float(y), []).append((float(x), unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(text for _, text in sorted(rows[y])) for y in sorted(rows))


def squeezed(text: str) -> str:
    """Letters and digits alone: lines are wrapped, and a frame runs beside them."""
    return "".join(re.findall(r"\w", text))
