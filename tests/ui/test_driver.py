"""What the terminal sends: pastes whole and literally, keys as keys."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from textual import events

from dsv41chat.ui.driver import PASTE_KEYS, PasteParser, TerminalDriver, gathered

BEGIN, END = "\x1b[200~", "\x1b[201~"
COLOURS = "A\x1b[31mRED\x1b[0m B"
REPORTS = "\x1b[I\x1b[<0;1;1M\x1b[48;10;10;10;10t\x1b[?2026;1$y"
TITLE = "A\x1b]0;pwn\x07 X\r\x03"


def parsed(data: str, piece: int) -> list[str]:
    """"p:TEXT" for a paste, "k:KEY" for a key, of `data` fed in pieces."""
    parser = PasteParser()
    found = []
    for start in range(0, len(data), piece):
        for message in parser.feed(data[start : start + piece]):
            assert isinstance(message, (events.Paste, events.Key))
            found.append(f"p:{message.text}" if isinstance(message, events.Paste) else f"k:{message.key}")
    return found


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", [COLOURS, TITLE, "", "\x1b", "\x1b\x1b[A", "\x1b[200", "l1\rl2", REPORTS])
def test_a_paste_is_one_message_with_its_text(text, piece):
    assert parsed(f"a{BEGIN}{text}{END}\x1b[Ab{BEGIN}2{END}", piece) == ["k:a", f"p:{text}", "k:up", "k:b", "p:2"]


def test_a_pasted_closing_mark_does_not_let_the_rest_out():
    assert parsed(f"{BEGIN}one{END}\rtwo{END}x", 1000) == [f"p:one{END}\rtwo", "k:x"]


def test_a_pasted_opening_mark_is_text():
    assert parsed(f"{BEGIN}one{BEGIN}two{END}x", 1000) == [f"p:one{BEGIN}two", "k:x"]


def test_a_long_paste_in_pieces():
    text = "0123456789\r" * 20_000
    assert parsed(f"{BEGIN}{text}{END}", 4096) == [f"p:{text}"]


@pytest.mark.parametrize(
    ("reads", "keys"),
    [
        (["\x1b", "half"], ["escape", "h", "a", "l", "f"]),
        (["\x1b", "\r"], ["escape", "enter"]),
        (["\x1b", "\x03"], ["escape", "ctrl+c"]),
        (["\x1b", "\x1b", "x"], ["escape", "escape", "x"]),
        (["\x1b", "\x1b[A"], ["escape", "up"]),
        (["\x1b", "[A", "x"], ["up", "x"]),
        (["\x1b[", "A"], ["up"]),
        (["\x1b", "OP"], ["f1"]),
        (["\x1b1", "x"], ["alt+1", "x"]),
        (["\x1b", "1"], ["escape", "1"]),
        (["\x1bx", "y"], ["alt+x", "y"]),
    ],
)
def test_esc_is_a_key_whatever_follows_at_once(reads, keys):
    """A key with alt comes in one piece; a key's sequence may be torn by a connection."""
    parser = PasteParser()
    found = [message.key for data in reads for message in parser.feed(data)]
    if parser._timeout_time is not None:
        parser._timeout_time = 0.0
        found += [message.key for message in parser.tick()]
    assert found == keys


def test_an_esc_at_the_end_of_a_paste_belongs_to_it():
    parser = PasteParser()
    found = [message for data in (f"{BEGIN}a\x1b", "b", f"{END}x") for message in parser.feed(data)]
    assert found[0].text == "a\x1bb" and [message.key for message in found[1:]] == ["x"]


def test_keys_of_one_read_came_at_one_time():
    """However long the machine took between them: by these times the composer tells a paste from an Enter that sends."""

    def slowly(data: str):
        for number, message in enumerate(PasteParser().feed(data)):
            message.time += number
            yield message

    found: list[events.Key] = []
    TerminalDriver._pass_on(SimpleNamespace(process_message=found.append), slowly("abc\r"))
    assert [key.key for key in found] == ["a", "b", "c", "enter"] and len({key.time for key in found}) == 1


def test_many_keys_of_one_read_are_one_paste():
    """A paste without its marks: key by key a hundred kilobytes would hold the screen for a minute."""
    text = "def f(x):\r\treturn x + 1  # \u00e9\U0001f40d\n" * 2000
    (found,) = gathered(PasteParser().feed(text))
    assert isinstance(found, events.Paste) and found.text == text and found.handler_name == "on_paste"
    few = "a\r" * (PASTE_KEYS // 2 - 1)
    assert [message.key for message in gathered(PasteParser().feed(few))] == ["a", "enter"] * (PASTE_KEYS // 2 - 1)
    many = "b" * PASTE_KEYS
    mixed = list(gathered(PasteParser().feed(f"{many}\x03{many}\x1b[A{few}{BEGIN}p{END}")))
    shown = [message.text if isinstance(message, events.Paste) else message.key for message in mixed]
    assert shown == [many, "ctrl+c", many, "up", *["a", "enter"] * (PASTE_KEYS // 2 - 1), "p"]


@pytest.mark.parametrize("burst", [True, False])
def test_what_comes_in_many_reads_is_gathered(burst):
    """As a terminal gives it: a few kilobytes at a time."""
    text = "0123456789 " * 4000
    reading, writing = os.pipe()
    found: list[events.Event] = []
    exit_event = threading.Event()
    driver = TerminalDriver.__new__(TerminalDriver)
    driver.fileno, driver.exit_event, driver._debug = reading, exit_event, False
    driver._app = SimpleNamespace(settings=SimpleNamespace(ui=SimpleNamespace(burst_paste=burst)))
    driver.process_message = found.append
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(text.encode())
    try:
        driver.run_input_thread()  # to the end of the pipe
    finally:
        os.close(reading)
    if burst:
        assert [event.text for event in found] == [text]
    else:
        assert [event.character for event in found] == list(text)
