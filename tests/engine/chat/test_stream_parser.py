"""The stream parser beyond the goldens: chunk independence, damage, channels, and the ids it keeps."""

from __future__ import annotations

from random import Random

import pytest

from dsv41chat.engine.chat.detokenize import Detokenizer
from dsv41chat.engine.chat.encode import Message, RenderOptions, ToolCall, encode_prompt
from dsv41chat.engine.chat.markers import DSML, END_THINK, FAMILIES, THINK
from dsv41chat.engine.chat.segments import Special, Text, encode
from dsv41chat.engine.chat.stream_parser import Delta, Finish, ReasoningEnd, StreamParser, ToolCallEnd
from dsv41chat.engine.chat.tokenizer import BYTE_ALPHABET
from dsv41chat.engine.chat.tools import calls_block
from tests.engine.chat.golden import cases
from tests.engine.chat.random_chats import _TOOLS, random_unicode
from tests.engine.chat.random_streams import random_stream
from tests.engine.chat.streams import Collected, collect
from tests.engine.chat.test_chat_goldens import parser_of
from tests.markers import CONTROL, decode
from tests.release_tokenizer import release_tokenizer
from tests.small_tokenizer import small_tokenizer

D, END = Special(DSML), Special(END_THINK)


def ids_of(*parts, tokenizer=None) -> list[int]:
    return encode([Text(part) if isinstance(part, str) else part for part in parts], tokenizer or small_tokenizer())


def parse(*parts, start="content", tools=True, finish="stop", tokenizer=None) -> Collected:
    tokenizer = tokenizer or small_tokenizer()
    return collect(StreamParser(tokenizer, "v41", start, tools=tools), ids_of(*parts, tokenizer=tokenizer), finish)


def in_bytes(tokenizer, ids: list[int]) -> list[int]:
    """The same text in the smallest pieces: one id per byte; control ids stay."""
    alphabet = {byte: char for char, byte in BYTE_ALPHABET.items()}
    single = {tokenizer.token_string(id): id for id in range(tokenizer.vocab_size) if not tokenizer.is_added(id)}
    out = []
    for id in ids:
        out += [id] if tokenizer.is_added(id) else [single[alphabet[byte]] for byte in tokenizer.token_bytes(id)]
    return out


@pytest.mark.parametrize("case", cases("stream_cases"), ids=lambda case: case["id"])
def test_goldens_in_bytes(case):
    """The events add up to the same however the text is cut into ids."""
    whole = collect(parser_of(case), case["ids"], case["finish"])
    assert collect(parser_of(case), in_bytes(release_tokenizer(case["family"]), case["ids"]), case["finish"]) == whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", [False, True])
def test_random_streams_in_any_chunks(family, damage):
    tokenizer, rng = small_tokenizer(), Random(4)
    for _ in range(400):
        start, tools, ids, finish = random_stream(rng, tokenizer, family, damage=damage)
        whole, parser = collect(first := StreamParser(tokenizer, family, start, tools), ids, finish), StreamParser(tokenizer, family, start, tools)
        cut = in_bytes(tokenizer, ids)
        assert collect(parser, cut, finish) == whole
        if damage or tokenizer.marker(DSML) in ids:
            continue
        for p, fed in ((first, ids), (parser, cut)):
            end = [tokenizer.marker(END_THINK)] if tokenizer.marker(END_THINK) in fed and start.startswith("reasoning") else []
            assert [*p.reasoning_ids, *end, *p.body_ids] == fed


def test_small_and_release_tokenizers_agree():
    rng_a, rng_b = Random(6), Random(6)
    for _ in range(150):
        a = random_stream(rng_a, small_tokenizer(), "v41", damage=False)
        b = random_stream(rng_b, release_tokenizer("v41"), "v41", damage=False)
        got = [collect(StreamParser(t, "v41", s[0], s[1]), s[2], s[3]) for t, s in ((small_tokenizer(), a), (release_tokenizer("v41"), b))]
        assert got[0] == got[1]


def test_text_passes_unchanged_and_in_whole_characters():
    tokenizer, rng = small_tokenizer(), Random(10)
    for _ in range(200):
        text = random_unicode(rng, rng.randint(1, 30))
        ids = tokenizer.encode_text(text)
        parser, out = StreamParser(tokenizer, "v41", "content_continuation", tools=rng.random() < 0.5), ""
        for id in ids:
            for event in parser.feed(id):
                assert isinstance(event, Delta) and event.channel == "answer"
                assert "\ufffd" not in event.text or "\ufffd" in text
                out += event.text
        out += "".join(event.text for event in parser.finish("stop") if isinstance(event, Delta))
        assert out == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.feed(id) for id in ids) + detokenizer.finish() == text


@pytest.mark.parametrize("spelling", CONTROL)
def test_spelled_markers_are_text(spelling):
    text = f"a {spelling} b <{spelling} c>"
    assert parse(text, END, text, start="reasoning") == Collected(text, text, [], "stop")


def test_channels_and_events():
    tokenizer = small_tokenizer()
    parser = StreamParser(tokenizer, "v41", "reasoning", tools=True)
    assert parser.channel == "thinking" and not parser.finished
    events = [event for id in ids_of("r", END) for event in parser.feed(id)]
    assert events == [Delta("thinking", "r"), ReasoningEnd()] and parser.channel == "answer"
    events = [e for id in encode(calls_block("v41", (ToolCall("c", "f", '{"a": "x"}'),)), tokenizer) for e in parser.feed(id)]
    assert events[-1] == ToolCallEnd(0, '{"a": "x"}', True) and parser.finished and parser.channel == "answer"
    assert parser.feed(tokenizer.encode_text("x")[0]) == []
    assert parser.finish("stop") == [Finish("tool_calls")]


def test_line_breaks_wait_until_something_follows():
    parser = StreamParser(small_tokenizer(), "v41", "content", tools=False)
    deltas = [[e.text for id in ids_of(part) for e in parser.feed(id)] for part in ("\n", "a", "\n", "\n", "b\n")]
    assert ["".join(texts) for texts in deltas] == ["", "a", "", "", "\n\nb"]
    assert parser.finish("length") == [Delta("answer", "\n"), Finish("length")]


def test_markup_without_tools_is_text():
    block = calls_block("v41", (ToolCall("c", "f", '{"a": "x"}'),))
    got = parse("pre", *block, tools=False)
    assert got.calls == [] and got.finish == "stop"
    assert got.answer == "pre" + "".join(s.text if isinstance(s, Text) else s.spelling for s in block)


def test_a_marker_without_its_bracket_is_text():
    """An answer that talks about the markup; the released model's own parser reads it so, too."""
    assert parse("the ", D, " token\n\n", D, " and </", D, " end").answer == "the ｜DSML｜ token\n\n｜DSML｜ and </｜DSML｜ end"
    value = ("x <", D, " y ", D, " z")
    got = parse("\n\n<", D, ' invoke name="f">\n<', D, ' parameter name="a" string="true">', *value, "</", D, " parameter>\n</", D, " invoke>")
    assert got.calls == [("f", '{"a": "x <｜DSML｜ y ｜DSML｜ z"}')]


def calls(*parts, start="tool", finish="stop"):
    tokenizer = small_tokenizer()
    parser = StreamParser(tokenizer, "v41", start, tools=True)
    events = [event for id in ids_of(*parts) for event in parser.feed(id)] + parser.finish(finish)
    return [event for event in events if isinstance(event, ToolCallEnd)], events[-1].reason


PARAMETER = ("<", D, ' parameter name="a" string="false">', "{value}", "</", D, " parameter>\n")


def call_with(value: str, *tail):
    parts = ("<", D, ' invoke name="f">\n', *(part.format(value=value) if isinstance(part, str) else part for part in PARAMETER), *tail)
    return calls(*parts)


CLOSE = ("</", D, " invoke>\n</", D, " calls>")


@pytest.mark.parametrize(("value", "valid"), [("1", True), ("[1, 2]", True), ("tru", False), ("", False), ("1, 2", False), ("[" * 100_000, False)])
def test_validity_of_arguments(value, valid):
    ends, reason = call_with(value, *CLOSE)
    assert ends == [ToolCallEnd(0, f'{{"a": {value}}}', valid)] and reason == "tool_calls"


def test_a_call_that_is_not_closed_is_not_valid():
    for tail in ((), ("</", D, " calls>"), ("<", D, ' invoke name="g">\n</', D, " invoke>")):
        ends, _ = call_with("1", *tail)
        assert ends[0] == ToolCallEnd(0, '{"a": 1', False)
        assert [end.valid for end in ends[1:]] == [True] * (len(ends) - 1)


def test_a_cut_value_keeps_what_was_there():
    ends, reason = calls("<", D, ' invoke name="f">\n<', D, ' parameter name="a" string="true">x</', finish="cancelled")
    assert ends == [ToolCallEnd(0, '{"a": "x</', False)] and reason == "cancelled"


def test_strange_headers():
    assert calls("<", D, "   invoke   name=\"f>g\"  other='1'  >", *CLOSE)[0] == [ToolCallEnd(0, "{}", True)]
    assert calls("<", D, ' parameter name="a" string="true">x</', D, " parameter>", *CLOSE) == ([], "stop")
    assert calls("<", D, "<", D, ' invoke name="f">', *CLOSE)[0] == [ToolCallEnd(0, "{}", True)]
    assert calls("</", D, " invoke>\n", "<", D, ' invoke name="f">', *CLOSE)[0] == [ToolCallEnd(0, "{}", True)]


def test_control_ids_inside_values_are_literal():
    got = parse("<", D, ' invoke name="f"><', D, ' parameter name="a" string="true">', Special(THINK), "x", END, "</", D, " parameter>", *CLOSE)
    assert got.calls == [("f", '{"a": "<think>x</think>"}')]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["thinking", "thinking.", "é\n"])
def test_ids_of_a_call_inside_reasoning_render_as_its_body(family, text):
    """The next prompt closes the thinking part and repeats the call's ids."""
    tokenizer = small_tokenizer()
    options = RenderOptions(thinking=True, tools=_TOOLS)
    call = (ToolCall("c0", "now", "{}"),)
    fed = [*tokenizer.encode_text(text), *encode(calls_block(family, call), tokenizer)]
    parser = StreamParser(tokenizer, family, "reasoning", tools=True)
    assert collect(parser, fed, "stop").finish == "tool_calls"
    assert [*parser.reasoning_ids, *parser.body_ids] == fed
    assert decode(tokenizer, parser.body_ids).startswith("\n") and decode(tokenizer, parser.reasoning_ids).startswith(text.strip())
    user = Message("user", "q")
    answer = Message("assistant", "", text, call, reasoning_ids=parser.reasoning_ids, body_ids=parser.body_ids)
    prompt = encode_prompt(tokenizer, family, [user], options)
    following = encode_prompt(tokenizer, family, [user, answer, Message("tool", "t", tool_call_id="c0")], options)
    live = [*prompt.ids, *parser.reasoning_ids, tokenizer.marker(END_THINK), *parser.body_ids]
    assert list(following.ids[: len(live)]) == live


def test_required_call_keeps_the_opened_block():
    tokenizer = small_tokenizer()
    options, user = RenderOptions(thinking=False, tools=_TOOLS, tool_choice="required"), Message("user", "q")
    prompt = encode_prompt(tokenizer, "v41", [user], options)
    parser = StreamParser(tokenizer, "v41", prompt.start, tools=prompt.tools, opened=prompt.opened)
    fed = ids_of("<", D, ' invoke name="now">\n', *CLOSE)
    collect(parser, fed, "stop")
    answer = Message("assistant", tool_calls=(ToolCall("c", "now", "{}"),), body_ids=parser.body_ids)
    following = encode_prompt(tokenizer, "v41", [user, answer, Message("tool", "t", tool_call_id="c")], options)
    live = [*prompt.ids, *fed]
    assert list(following.ids[: len(live)]) == live


def test_second_end_of_thinking_stays_in_the_body_ids():
    tokenizer = small_tokenizer()
    parser = StreamParser(tokenizer, "v41", "reasoning")
    fed = ids_of("r", END, "a", END, "b")
    assert collect(parser, fed, "stop") == Collected("r", "ab", [], "stop")
    assert list(parser.reasoning_ids) == ids_of("r") and list(parser.body_ids) == ids_of("a", END, "b")


def test_unknown_start_and_family():
    with pytest.raises(ValueError, match="middle"):
        StreamParser(small_tokenizer(), "v41", "middle")
    with pytest.raises(ValueError, match="v9"):
        StreamParser(small_tokenizer(), "v9", "content")
