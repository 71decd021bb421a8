"""Prompts, streams, prefixes and detokenising against the goldens of both families."""

from __future__ import annotations

import pytest

from dsv41chat.engine.chat.detokenize import Detokenizer
from dsv41chat.engine.chat.encode import Ids, Special, Text, encode_prompt, render
from dsv41chat.engine.chat.stream_parser import StreamParser
from tests.engine.chat.golden import cases, load, message, options
from tests.engine.chat.streams import Collected, collect
from tests.release_tokenizer import SHA256, release_tokenizer


def by_id(name: str):
    return pytest.mark.parametrize("case", cases(name), ids=lambda case: case["id"])


@by_id("prompt_cases")
def test_prompt(case):
    messages, opts = [message(m) for m in case["messages"]], options(case["options"])
    segments = render(case["family"], messages, opts)
    assert not any(isinstance(s, Ids) for s in segments)
    assert "".join(s.text if isinstance(s, Text) else s.spelling for s in segments) == case["prompt"]
    prompt = encode_prompt(release_tokenizer(case["family"]), case["family"], messages, opts)
    assert list(prompt.ids) == case["ids"]


@by_id("prompt_cases")
def test_marks_of_a_prompt(case):
    tokenizer = release_tokenizer(case["family"])
    messages, opts = [message(m) for m in case["messages"]], options(case["options"])
    prompt = encode_prompt(tokenizer, case["family"], messages, opts)
    # The system part is the same whatever is said afterwards, and a turn begins right behind it.
    assert 1 <= prompt.system_end <= prompt.header_start < len(prompt.ids)
    assert tokenizer.is_added(prompt.ids[prompt.system_end])
    header = tokenizer.token_string(prompt.ids[prompt.header_start])
    assert header == "<｜Assistant｜>" or (messages[-1].task and header == f"<｜{messages[-1].task}｜>")
    last = tokenizer.token_string(prompt.ids[-1])
    if not messages[-1].prefix:
        assert prompt.start == ("tool" if opts.tool_choice == "required" else "reasoning" if last == "<think>" else "content")
    else:
        tail = prompt.ids[prompt.header_start :]
        assert prompt.start == ("content_continuation" if tokenizer.marker("</think>") in tail else "reasoning_continuation")
    assert prompt.ids[len(prompt.ids) - len(prompt.opened) :] == prompt.opened
    assert bool(prompt.opened) == (prompt.start == "tool")


def parser_of(case) -> StreamParser:
    start = case["start"]
    if start == "reasoning_start":
        start = "tool" if case["in_tool_block"] else "reasoning" if case["thinking"] else "content"
    return StreamParser(release_tokenizer(case["family"]), case["family"], start, tools=case["tools"])


@by_id("stream_cases")
def test_stream(case):
    got = collect(parser_of(case), case["ids"], case["finish"])
    expected = case["expected"]
    assert got == Collected(
        thinking=expected["reasoning"],
        answer=expected["content"],
        calls=[(call["name"], call["arguments"]) for call in expected["tool_calls"]],
        finish=expected["finish_reason"],
    )


@by_id("stream_cases")
def test_stream_ids_are_kept(case):
    parser = parser_of(case)
    collect(parser, case["ids"], case["finish"])
    reasoning, body = list(parser.reasoning_ids), list(parser.body_ids)
    end = release_tokenizer(case["family"]).marker("</think>")
    assert case["ids"] in ([*reasoning, end, *body], [*reasoning, *body])
    assert end not in reasoning


@by_id("prefix_cases")
def test_prefix(case):
    tokenizer, family = release_tokenizer(case["family"]), case["family"]
    first = encode_prompt(tokenizer, family, [message(m) for m in case["turn1"]], options(case["turn1_options"]))
    second = encode_prompt(tokenizer, family, [message(m) for m in case["turn2"]], options(case["turn2_options"]))
    live = list(first.ids)
    for part in case["generated"]:
        live += [part] if isinstance(part, int) else tokenizer.encode_text(part)
    lcp = next((i for i, (a, b) in enumerate(zip(live, second.ids)) if a != b), min(len(live), len(second.ids)))
    assert (len(first.ids), len(live), len(second.ids), lcp) == (
        case["prompt1_len"],
        case["live_len"],
        case["prompt2_len"],
        case["lcp_live_vs_prompt2"],
    )
    assert (lcp == len(live)) == case["append_only"]
    assert list(first.ids)[-len(case["prompt1_ids_tail"]) :] == case["prompt1_ids_tail"]
    if case["diverges_at"]:
        assert live[lcp : lcp + 3] == case["diverges_at"]["live"]
        assert list(second.ids[lcp : lcp + 3]) == case["diverges_at"]["prompt2"]


@by_id("detok_cases")
def test_detokenise(case):
    for family in SHA256:
        detokenizer = Detokenizer(release_tokenizer(family))
        assert [detokenizer.feed(id) for id in case["ids"]] == case["steps"]
        assert detokenizer.finish() == ""


def test_tokenizer_facts():
    facts = load("tokenizer_facts")
    assert {family: facts["sha256"][family] for family in SHA256} == SHA256
    for family in SHA256:
        tokenizer = release_tokenizer(family)
        assert tokenizer.sha256 == SHA256[family]
        assert tokenizer.vocab_size == facts["vocab_size"]
        assert len(tokenizer.added) == facts["added_tokens"]
    v41, v4 = release_tokenizer("v41"), release_tokenizer("v4")
    assert {spelling: v41.find_marker(spelling) for spelling in facts["special_ids"]} == facts["special_ids"]
    differing = [id for id in range(v4.vocab_size) if v4.token_bytes(id) != v41.token_bytes(id)]
    assert len(differing) == 9
    assert v4.find_marker("<｜System｜>") is None


def test_protocol_strings_are_the_published_ones():
    """The goldens render each constant at least once; these two never occur in them."""
    from dsv41chat.engine.chat import effort

    constants = load("constants")
    for profile, levels in constants["effort_v4"].items():
        for level, text in levels.items():
            assert effort.effort_text("v4", level, profile) == text
    assert effort.effort_text("v41", 7) == constants["effort_v41_template"].format(n=7)
    assert effort.V41_LEVELS == constants["effort_v41_levels"]
    assert [s for s in render("v4", [message({"role": "user", "content": "x"})], options({"effort_level": "max"}))][1] == Text(
        constants["effort_v4"]["official"]["max"]
    )
    assert Special(constants["dsml"])
