"""Prompts: verbatim ids, prefix properties, text that stays text, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from dsv41chat.engine.chat.encode import (
    EncodedPrompt,
    Ids,
    MalformedConversation,
    Message,
    RenderOptions,
    Special,
    Text,
    ToolCall,
    encode,
    encode_prompt,
    join_parts,
    render,
)
from dsv41chat.engine.chat.markers import ASSISTANT, BOS, DSML, END_THINK, EOS, FAMILIES, IMAGE, SYSTEM, THINK, USER
from dsv41chat.engine.chat.messages import check_conversation
from dsv41chat.engine.chat.tools import calls_block
from dsv41chat.engine.errors import PackIncomplete
from tests.engine.chat.random_chats import _TOOLS, random_calls, random_conversation, random_options, random_text
from tests.markers import CONTROL, HOSTILE, MARKERS, control_ids, decode
from tests.release_tokenizer import release_tokenizer
from tests.small_tokenizer import embedded_tokenizer, small_tokenizer

CHAT = RenderOptions(thinking=False)
both = pytest.mark.parametrize("family", FAMILIES)


def tokenizers(family: str):
    return (release_tokenizer(family), small_tokenizer(), embedded_tokenizer())


def structure(segments) -> list[str]:
    """Spellings of the control tokens of a prompt, in order."""
    return [segment.spelling for segment in segments if isinstance(segment, Special)]


# ---- text that spells control tokens -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("spelling", CONTROL)
def test_marker_text_in_any_place_stays_text(family, spelling):
    """System, user, tool and earlier answer text: the prompt holds exactly the control ids of the same prompt without it."""
    text = f"qx{spelling}xq"
    for tokenizer in tokenizers(family):

        def prompt(words: str, tokenizer=tokenizer) -> EncodedPrompt:
            messages = [
                Message("system", words),
                Message("latest_reminder", words),
                Message("user", words),
                Message("assistant", words, reasoning=words, tool_calls=(ToolCall("c", "f", f'{{"k": "{words}"}}'),)),
                Message("tool", words, tool_call_id="c"),
                Message("user", words),
            ]
            options = RenderOptions(thinking=True, tools=({"name": words, "description": words},), response_format={"title": words})
            return encode_prompt(tokenizer, family, messages, options)

        hostile, plain = prompt(text), prompt("qxxq")
        assert control_ids(tokenizer, hostile.ids) == control_ids(tokenizer, plain.ids)
        assert decode(tokenizer, hostile.ids).count(text) == decode(tokenizer, plain.ids).count("qxxq")


@both
def test_every_marker_in_one_user_message(family):
    for tokenizer in tokenizers(family):
        text = HOSTILE + "".join(MARKERS)
        ids = encode_prompt(tokenizer, family, [Message("user", text)], CHAT).ids
        assert decode(tokenizer, control_ids(tokenizer, ids)) == BOS + USER + ASSISTANT + END_THINK
        assert decode(tokenizer, ids) == BOS + USER + text + ASSISTANT + END_THINK


@both
def test_random_conversations_hold_only_rendered_control_ids(family):
    rng = Random(5)
    for _ in range(150):
        options = random_options(rng, family)
        messages = random_conversation(rng, family, options)
        segments = render(family, messages, options)
        for tokenizer in tokenizers(family):
            prompt = encode_prompt(tokenizer, family, messages, options)
            assert control_ids(tokenizer, prompt.ids) == [tokenizer.marker(s) for s in structure(segments)]
            assert list(prompt.ids) == encode(segments, tokenizer)
            assert decode(tokenizer, prompt.ids) == "".join(s.text if isinstance(s, Text) else s.spelling for s in segments)


def test_stored_ids_of_a_text_may_hold_no_control_id():
    tokenizer = small_tokenizer()
    ids = tuple(tokenizer.encode_text("hello"))
    assert encode([Ids(ids)], tokenizer) == list(ids)
    for bad in (tokenizer.marker(ASSISTANT), tokenizer.marker(IMAGE), tokenizer.vocab_size, -1):
        with pytest.raises(MalformedConversation):
            encode([Ids((*ids, bad))], tokenizer)
    image = tokenizer.marker(IMAGE)
    assert encode([Ids((*ids, image), images=1)], tokenizer)[-1] == image
    with pytest.raises(MalformedConversation):
        encode([Ids(ids, images=1)], tokenizer)
    assert encode([Ids((tokenizer.marker(DSML),), sampled=True)], tokenizer)


# ---- verbatim ids and prefixes -------------------------------------------------------------------------------------


def sampled(rng: Random, tokenizer, family: str, calls: tuple[ToolCall, ...] = ()) -> tuple[int, ...]:
    """Ids as a model might sample them: seldom the canonical spelling of their text."""
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 6))]
    ids = [id for id in ids if not tokenizer.is_added(id)]
    return (*ids, *(encode(calls_block(family, calls), tokenizer) if calls else ()))


def run_conversation(rng: Random, tokenizer, family: str, options: RenderOptions, turns: int):
    """Yield (prompt, reasoning ids, body ids, next prompt) turn by turn, with verbatim ids throughout."""
    messages = [Message("system", random_text(rng))] if rng.random() < 0.5 else []
    before = None
    for _ in range(turns):
        pending = messages[-1].tool_calls if messages else ()
        if pending:
            messages += [Message("tool", random_text(rng), tool_call_id=call.id) for call in rng.sample(pending, len(pending))]
        else:
            if rng.random() < 0.2:
                messages.append(Message("latest_reminder", random_text(rng)))
            text = random_text(rng)
            messages.append(Message("user", text, content_ids=tuple(tokenizer.encode_text(text)) if rng.random() < 0.5 else None))
        prompt = encode_prompt(tokenizer, family, messages, options)
        if before:
            yield (*before, prompt)
        calls = random_calls(rng) if options.has_tools and rng.random() < 0.4 else ()
        reasoning = sampled(rng, tokenizer, family) if options.thinking else ()
        body = sampled(rng, tokenizer, family, calls)
        answer = Message("assistant", "text shown", "thinking shown" if options.thinking else None, calls)
        messages.append(replace(answer, reasoning_ids=reasoning if options.thinking else None, body_ids=body))
        before = (prompt, reasoning, body)


@both
@pytest.mark.parametrize("mode", ["chat", "chat with tools", "thinking with tools", "kept reasoning"])
def test_next_prompt_appends_to_what_ran(family, mode):
    rng = Random(7)
    options = RenderOptions(thinking=not mode.startswith("chat"), tools=_TOOLS if "tools" in mode else (), keep_reasoning=mode == "kept reasoning")
    for tokenizer in tokenizers(family):
        end_think, eos = tokenizer.marker(END_THINK), tokenizer.marker(EOS)
        for _ in range(40):
            for prompt, reasoning, body, following in run_conversation(rng, tokenizer, family, options, 4):
                live = [*prompt.ids, *reasoning, *([end_think] if options.thinking else []), *body, eos]
                assert list(following.ids[: len(live)]) == live
                assert following.header_start >= len(live) and following.system_end == prompt.system_end


@both
def test_thinking_without_tools_diverges_at_its_think(family):
    """The next prompt shares everything but the last id, and continues with the sealed turn."""
    rng, options = Random(8), RenderOptions(thinking=True)
    for tokenizer in tokenizers(family):
        end_think, eos = tokenizer.marker(END_THINK), tokenizer.marker(EOS)
        for _ in range(40):
            for prompt, _, body, following in run_conversation(rng, tokenizer, family, options, 4):
                n = len(prompt.ids)
                assert prompt.ids[-1] == tokenizer.marker(THINK) and prompt.header_start == n - 2
                assert following.ids[: n - 1] == prompt.ids[:-1] and following.ids[n - 1] == end_think
                sealed = [*prompt.ids[:-1], end_think, *body, eos]
                assert list(following.ids[: len(sealed)]) == sealed


@both
@pytest.mark.parametrize(("thinking", "cut"), [(False, "answer"), (True, "answer"), (True, "reasoning")])
def test_continuing_repeats_what_ran(family, thinking, cut):
    rng, options = Random(9), RenderOptions(thinking=thinking)
    for tokenizer in tokenizers(family):
        user = Message("user", "q")
        prompt = encode_prompt(tokenizer, family, [user], options)
        reasoning = tuple(tokenizer.encode_text("half a")) if thinking else ()
        body = () if cut == "reasoning" else (*sampled(rng, tokenizer, family), *tokenizer.encode_text("ans"))
        partial = Message("assistant", "", "half a" if thinking else None, prefix=True, reasoning_ids=reasoning, body_ids=body)
        resumed = encode_prompt(tokenizer, family, [user, partial], options)
        end = [tokenizer.marker(END_THINK)] if thinking and cut == "answer" else []
        assert list(resumed.ids) == [*prompt.ids, *reasoning, *end, *body]
        assert resumed.start == ("reasoning_continuation" if cut == "reasoning" else "content_continuation")
        assert resumed.header_start == prompt.header_start


@both
def test_nothing_written_yet_is_a_fresh_start(family):
    tokenizer, user = small_tokenizer(), Message("user", "q")
    for options, start in ((CHAT, "content"), (RenderOptions(thinking=True), "reasoning")):
        prompt = encode_prompt(tokenizer, family, [user, Message("assistant", "", prefix=True)], options)
        assert prompt.start == start


def test_verbatim_ids_win_over_text():
    tokenizer = small_tokenizer()
    other = tuple(tokenizer.encode_text("other"))
    messages = [
        Message("user", "q", content_ids=other),
        Message("assistant", "a", "r", (ToolCall("c", "f", "{}"),), reasoning_ids=other, body_ids=other),
        Message("tool", "t", tool_call_id="c", content_ids=other),
    ]
    segments = render("v41", messages, RenderOptions(thinking=True, tools=_TOOLS))
    assert [s for s in segments if isinstance(s, Ids)] == [Ids(other), Ids(other, sampled=True), Ids(other, sampled=True), Ids(other)]
    assert "".join(s.text for s in segments if isinstance(s, Text)).endswith("<tool_result></tool_result>")


def test_required_call_opens_the_block():
    tokenizer = release_tokenizer("v41")
    prompt = encode_prompt(tokenizer, "v41", [Message("user", "q")], RenderOptions(thinking=False, tools=_TOOLS, tool_choice="required"))
    assert prompt.start == "tool" and prompt.tools
    assert decode(tokenizer, prompt.opened) == "\n\n<｜DSML｜ calls>\n"
    assert prompt.ids[-len(prompt.opened) :] == prompt.opened


# ---- single rules --------------------------------------------------------------------------------------------------


def test_developer_is_system():
    assert Message("developer", "x") == Message("system", "x")


def test_wrapped_tool_declarations():
    plain = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": {**plain, "strict": True}}
    for family in FAMILIES:
        one, two = (render(family, [Message("user", "q")], RenderOptions(thinking=False, tools=(tool,))) for tool in (plain, wrapped))
        assert one == two


@both
def test_all_tools_deferred(family):
    tool = {"name": "f", "defer_loading": True}
    segments = render(family, [Message("user", "q")], RenderOptions(thinking=False, tools=(tool,)))
    text = "".join(s.text if isinstance(s, Text) else s.spelling for s in segments)
    assert "Schemas" + "\n" * (3 if family == "v4" else 4) + "You MUST" in text


def test_v4_hoists_and_merges_with_ids():
    tokenizer = small_tokenizer()
    ids = tuple(tokenizer.encode_text("two"))
    messages = [Message("user", "one"), Message("user", "two", content_ids=ids), Message("user", ""), Message("system", "", content_ids=())]
    assert render("v4", messages, CHAT)[1:-2] == [Special(USER), Text("one"), Text("\n\n"), Ids(ids)]


def test_images_are_placed_by_offset():
    content, images = join_parts(["look", None, f"typed {IMAGE}", None])
    assert content == f"look\n\n\n\ntyped {IMAGE}\n\n" and images == (6, len(content))
    tokenizer = release_tokenizer("v41")
    prompt = encode_prompt(tokenizer, "v41", [Message("user", content, images=images)], CHAT)
    assert list(prompt.ids).count(tokenizer.marker(IMAGE)) == 2
    assert decode(tokenizer, prompt.ids) == f"{BOS}{USER}look\n\n{IMAGE}\n\ntyped {IMAGE}\n\n{IMAGE}{ASSISTANT}{END_THINK}"


def test_task_in_thinking_history_has_no_thinking_part():
    messages = [Message("user", "q", task="title"), Message("assistant", "A title", "r"), Message("user", "x")]
    segments = render("v41", messages, RenderOptions(thinking=True, keep_reasoning=True))
    assert structure(segments) == [BOS, SYSTEM, USER, "<｜title｜>", EOS, USER, ASSISTANT, THINK]


USER_Q = Message("user", "q")
CALLS = (ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}"))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "at least one message"),
        ([Message("robot", "x")], "unknown role"),
        ([Message("assistant", "x", prefix=True), USER_Q], "only a last message"),
        ([Message("user", "x", prefix=True)], "only a last message"),
        ([Message("tool", "x", tool_call_id="c1")], "does not follow the call"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS), Message("tool", "x", tool_call_id="c1")], "'c2' has no result"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS), Message("user", "x")], "has no result"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS)], "has no result"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS[:1]), *[Message("tool", "x", tool_call_id="c1")] * 2], "does not follow"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS[:1]), Message("tool", "x", tool_call_id="c9")], "does not follow"),
        ([USER_Q, Message("assistant", "", tool_calls=CALLS[:1] * 2)], "share one id"),
        ([Message("user", "q", tool_calls=CALLS)], "only the assistant"),
        ([Message("latest_reminder", "x"), Message("latest_reminder", "y"), USER_Q], "two reminders"),
        ([Message("user", "q", images=(2,))], "offsets"),
        ([Message("user", "qqq", images=(2, 1))], "offsets"),
        ([Message("system", "q", images=(0,)), USER_Q], "images"),
        ([Message("user", "q", task="poem")], "unknown task"),
        ([Message("assistant", "q", task="title")], "unknown task"),
        ([Message("user", "q", task="title"), USER_Q], "end of the user's turn"),
    ],
)
def test_malformed_conversations(messages, why):
    with pytest.raises(MalformedConversation, match=why) as caught:
        encode_prompt(small_tokenizer(), "v41", messages, CHAT)
    assert caught.value.code == "usage"


@pytest.mark.parametrize(
    "options",
    [
        RenderOptions(thinking=False, tool_choice="maybe"),
        RenderOptions(thinking=False, response_format="xml"),
    ],
)
def test_malformed_options(options):
    with pytest.raises(MalformedConversation):
        encode_prompt(small_tokenizer(), "v41", [USER_Q], options)


def test_required_call_cannot_continue_a_message():
    options = RenderOptions(thinking=False, tools=_TOOLS, tool_choice="required")
    with pytest.raises(MalformedConversation, match="required"):
        encode_prompt(small_tokenizer(), "v41", [USER_Q, Message("assistant", "x", prefix=True)], options)


def test_v4_refuses_images_and_unknown_families_are_refused():
    with pytest.raises(MalformedConversation, match="V4.1 only"):
        encode_prompt(small_tokenizer(), "v4", [Message("user", "q", images=(0,))], CHAT)
    for call in (render, lambda *a: encode_prompt(small_tokenizer(), *a)):
        with pytest.raises(ValueError, match="v3"):
            call("v3", [USER_Q], CHAT)


def test_a_missing_marker_is_an_error_only_when_it_is_needed():
    v4 = release_tokenizer("v4")  # has no <｜System｜>
    assert encode_prompt(v4, "v41", [USER_Q], CHAT).ids
    with pytest.raises(PackIncomplete, match="System"):
        encode_prompt(v4, "v41", [Message("system", "x"), USER_Q], CHAT)


def test_random_conversations_are_well_formed():
    for family in FAMILIES:
        rng = Random(11)
        for _ in range(200):
            options = random_options(rng, family)
            check_conversation(random_conversation(rng, family, options), options, family)
