"""Text to lines: the same blocks however a text arrives, lines that fit, copies without wrapping, no control characters."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from dsv41chat.ui.render.formulas import formula, show_formulas
from dsv41chat.ui.render.markdown import render_block
from dsv41chat.ui.render.palette import RenderOptions
from dsv41chat.ui.render.splitter import CODE_LINES, LIST_ITEMS, Block, PlainSplitter, Splitter
from dsv41chat.ui.render.wrap import break_line, copy_lines, crop_cells
from dsv41chat.ui.sanitize import sendable, visible, visible_line

PROSE = "# Title\n\nSome **bold** and *it* `code`, see https://example.com/x.\nSecond line.\n\n> quoted\n> more\n\n---\n\nlast"
CODE = "Look:\n```python\ndef f():\n\n    return '''\n```\nand\n~~~~\n```\n~~~\n~~~~\n    indented\n\nend `x`"
LISTS = "".join(f"{n}. item {n}\n" for n in range(1, 71))
LISTS += "\n- a\n  - b\n\n    still b\n- c\n\n1. one\n\n   ```sh\n   ls\n\n   pwd\n   ```\n\n   after\n2. two\n"
TABLE = "| a | b |\n|---|--:|\n" + "".join(f"| row {n} | {n * n} |\n" for n in range(230)) + "\nafter"
WIDE = "日本語のテキストは長いので折り返しが必要です。絵文字 👩‍👩‍👧 😀 é e\u0301 ok\n" * 5
NASTY = "a\x1b[31mred\x07\r\nb\rc\x9b2J\x00\u202eevil\tz\n```\n\x1b]0;t\x07\n```\n" + "x" * 9000
CORPUS = {"prose": PROSE, "code": CODE, "lists": LISTS, "table": TABLE, "wide": WIDE, "nasty": NASTY, "empty": "", "fence": "```py\nopen"}


def split(chunks, kind=Splitter):
    splitter = kind()
    for chunk in chunks:
        splitter.feed(chunk)
        splitter.tail  # noqa: B018 - looking at the tail must not change anything
    splitter.finish()
    return [(b.kind, b.source, b.info, b.number, b.indent, b.head, b.foot, b.start, b.tight) for b in splitter.blocks]


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("kind", [Splitter, PlainSplitter])
def test_chunks_do_not_change_the_blocks(name, kind):
    text = CORPUS[name]
    whole = split([text], kind)
    for seed in range(12):
        pick, chunks, at = random.Random(seed), [], 0
        while at < len(text):
            size = pick.choice([1, 2, 3, 17, 400]) if len(text) < 3000 else pick.choice([1, 50, 900])
            chunks.append(text[at : at + size])
            at += size
        assert split(chunks, kind) == whole


def test_blocks_keep_every_character():
    for name in ("prose", "wide"):
        joined = "\n\n".join(source for _, source, *_ in split([CORPUS[name]]))
        assert joined.replace("\n", "") == CORPUS[name].replace("\n", "")
    code = [(source, info, number) for kind, source, info, number, *_ in split([CODE]) if kind == "code"]
    assert code == [("def f():\n\n    return '''", "python", 1), ("```\n~~~", "", 2)]


def test_long_lists_are_cut_and_numbering_goes_on():
    blocks = split([LISTS])
    assert max(source.count("\n") + 1 for _, source, *_ in blocks) <= LIST_ITEMS
    assert [start for *_, start, _ in blocks[:4]] == [None, 21, 41, 61]
    repeated = Splitter()
    repeated.feed("1. x\n" * 25)
    repeated.finish()
    lines = render_block(repeated.blocks[1], RenderOptions(40))
    assert lines[0].text == "x" and "".join(s.text for s in lines[0].strip).startswith("21. ")


def test_code_in_a_list_item_keeps_its_place():
    options = RenderOptions(40)
    shown = ["".join(s.text for s in line.strip) for block in _blocks(LISTS) for line in render_block(block, options)]
    assert "   ls" in shown and "   after" in shown and "2. two" in shown


def _blocks(text: str) -> list[Block]:
    splitter = Splitter()
    splitter.feed(text)
    splitter.finish()
    return splitter.blocks


def test_long_code_is_cut_into_pieces_with_one_frame():
    source = "```\n" + "\n".join(f"line {n}" for n in range(CODE_LINES * 2 + 5)) + "\n```\n"
    blocks = _blocks(source)
    assert [(b.head, b.foot) for b in blocks] == [(True, False), (False, False), (False, True)]


def test_a_forming_fence_is_hidden_until_its_line_ends():
    splitter = Splitter()
    splitter.feed("text\n``")
    assert splitter.tail.source == "text"
    splitter.feed("`py")
    assert splitter.tail.source == "text"
    splitter.feed("\nx = 1\n``")
    assert splitter.tail.kind == "code" and splitter.tail.source == "x = 1"


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("width", [10, 37, 80])
def test_lines_fit_and_hold_no_control_characters(name, width):
    for block in _blocks(CORPUS[name]):
        for wrap in (False, True):
            for line in render_block(block, RenderOptions(width, wrap_code=wrap)):
                shown = "".join(segment.text for segment in line.strip)
                assert shown.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
                assert line.scrolled or line.strip.cell_length <= max(width, 12), shown


MARKED = "| a *b* | $x^2$ |\\|\n|:-:|---|--:|\n" + "".join(
    f"| **row** {n} | `a\\|b` 日本{n} | https://example.com/{n} |\n" if n % 7 else f"| {n} | short\n" for n in range(120)
)


@pytest.mark.parametrize("source", [TABLE.removesuffix("\nafter"), MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("width", [24, 60, 120])
def test_pieces_of_a_long_table_are_drawn_as_the_whole(source, width):
    table = [block for block in _blocks(source) if block.kind == "table"]
    assert len(table) > 3
    drawn = [line for block in table for line in render_block(block, RenderOptions(width))]
    # One block of Markdown, as the parser sees it.
    whole = render_block(Block("text", "\n".join(block.source for block in table)), RenderOptions(width))
    assert [(line.text, line.lead, line.scrolled) for line in drawn] == [(line.text, line.lead, line.scrolled) for line in whole]
    assert ["".join(s.text for s in line.strip) for line in drawn] == ["".join(s.text for s in line.strip) for line in whole]
    assert [[s.style for s in line.strip] for line in drawn] == [[s.style for s in line.strip] for line in whole]


def test_an_open_table_draws_only_its_new_rows_again():
    splitter = Splitter()
    splitter.feed("| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 60)
    before = splitter.tails
    splitter.feed("| 3 | 4 |\n| 5")
    after = splitter.tails
    assert len(before) > 3 and after[: len(before) - 1] == before[:-1]
    assert "\n".join(block.source for block in after).endswith("| 1 | 2 |\n| 3 | 4 |\n| 5")
    assert splitter.tail.source == "\n".join(block.source for block in after)


def test_break_line_loses_nothing_and_fits():
    pick = random.Random(5)
    pieces = ["a", "bb ", " ", "漢", "。", "（", "é", "e\u0301", "👩‍👩‍👧", "wordword", "  ", "-", "x" * 30]
    for _ in range(1500):
        text = "".join(pick.choice(pieces) for _ in range(pick.randrange(30))).lstrip()
        width = pick.randrange(2, 30)
        lines = break_line(text, width)
        assert "".join((joint if n else "") + text[a:b] for n, (a, b, joint) in enumerate(lines)).rstrip() == text.rstrip()
        assert all(cell_len(text[a:b]) <= width for a, b, _ in lines)


def test_copy_undoes_wrapping_and_decoration():
    source = "- a first item that is long enough to wrap over several lines\n- second\n\n> a quote that wraps too, certainly it does"
    lines = [line for block in _blocks(source) for line in render_block(block, RenderOptions(20))]
    copied = copy_lines((line.joint, line.text) for line in lines)
    assert copied == "a first item that is long enough to wrap over several lines\nsecond\na quote that wraps too, certainly it does"


def test_wide_tables_are_wrapped_then_scrolled():
    table = "| name | what |\n|---|---|\n| a | a long cell that must wrap |\n"
    lines = render_block(_blocks(table)[0], RenderOptions(24))
    assert not any(line.scrolled for line in lines) and max(line.strip.cell_length for line in lines) <= 24
    many = "|" + "|".join(f"column {n}" for n in range(9)) + "|\n" + "|---" * 9 + "|\n" + "|value value" * 9 + "|\n"
    assert all(line.scrolled for line in render_block(_blocks(many)[0], RenderOptions(40)))


def test_links_carry_only_web_addresses():
    block = _blocks("[a](https://x.org/y) [b](javascript:alert) [c](file:///etc/passwd)")[0]
    links = [segment.style.link for line in render_block(block, RenderOptions(80)) for segment in line.strip if segment.style and segment.style.link]
    assert links == ["https://x.org/y"]


def test_sanitizing():
    assert visible("a\x1b[31m\x07\x9b\x7f\ud800") == "a␛[31m␇�␡�"
    assert visible("a\r\nb\tc\n") == "a\nb   c\n"
    assert visible_line("a\nb") == "a␤b"
    assert sendable("l1\rl2\r\nl3\x00\x1b[0m") == "l1\nl2\nl3[0m"
    assert all(not 127 <= ord(c) < 160 and (ord(c) >= 32 or c == "\n") for c in visible("".join(map(chr, range(256)))))


def test_crop_cells():
    assert crop_cells("日本語", 5) == "日本…" and crop_cells("abc", 3) == "abc" and crop_cells("abc", 0) == ""


def test_formulas_become_unicode_and_prices_stay():
    for source, shown in (
        (r"\frac{a+b}{2}", "(a+b)/2"), (r"x_1^2 + \alpha_{ij}", "x₁² + αᵢⱼ"), (r"\sum_{i=0}^{n} x_i", "∑ᵢ₌₀ⁿ xᵢ"), (r"\sqrt[3]{8}", "∛8"),
        (r"\mathbb{R}^n", "ℝⁿ"), (r"\text{if } x \leq 0", "if x ≤ 0"), (r"\foo{x}", r"\foo{x}"), ("x^{T}", "xᵀ"), ("{{", "{{"), (r"\frac", r"\frac"),
    ):  # fmt: skip
        assert formula(source) == shown
    assert show_formulas("costs $5 and $10, `$x_1$`, $HOME and $x_1$") == "costs $5 and $10, `$x_1$`, $HOME and x₁"
    blocks = _blocks("Let $a_i * b_j$ be \\(\\alpha\\) and\n\n$$\nE = mc^2\n$$\n")
    shown = [line.text for block in blocks for line in render_block(block, RenderOptions(60))]
    assert shown == ["Let aᵢ * bⱼ be α and", "E = mc²"]
    source = [line.text for block in _blocks("$a_i$") for line in render_block(block, RenderOptions(60, math="source"))]
    assert source == ["$a_i$"]
