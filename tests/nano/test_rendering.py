"""What the trainer sees is what the product's encoder makes of the same conversation, id for id."""

from __future__ import annotations

from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.engram.token_map import derive_token_map
from dsv41chat.nano import arch, embedded_pack, tokenizer
from dsv41chat.nano.corpus import Corpus
from tests.nano.small_facts import folder


def test_training_ids_are_the_encoders_ids(tmp_path):
    stream, product = Corpus(folder(tmp_path), 21), ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")
    end = product.marker(arch.EOS)
    for _ in range(150):
        talk = stream.conversation()
        messages = [Message("system", talk.system)] if talk.system else []
        for i, turn in enumerate(talk.turns):
            messages.append(Message("user", turn.user))
            if i < len(talk.turns) - 1:
                messages.append(Message("assistant", turn.short if talk.thinking and turn.short else turn.answer))
        prompt = encode_prompt(product, "v41", messages, RenderOptions(thinking=talk.thinking, effort=talk.effort)).ids
        last = talk.turns[-1]
        ids, code, _, replies = stream.ids_of(talk, 100_000, 0)
        assert tuple(ids[: len(prompt)]) == tuple(prompt) and replies == len(talk.turns)
        answer = last.short if talk.thinking and last.short else last.answer
        body = ([*product.encode_text(last.thought), product.marker(arch.END_THINK)] if talk.thinking else []) + product.encode_text(answer)
        assert ids[len(prompt) :] == [*body, end]
        assert all(c & 7 >= 2 for c in code[len(prompt) :])


def test_the_trainers_token_map_is_the_engines():
    path = embedded_pack() / "tokenizer.json"
    assert tokenizer.compressed_map(path) == derive_token_map(path).tolist()


def test_markers():
    path = embedded_pack() / "tokenizer.json"
    ids = tokenizer.marker_ids(path)
    assert [ids[m] for m in (arch.BOS, arch.EOS, arch.PAD)] == [0, 1, 2]
    assert sorted(ids[m] for m in arch.MARKERS) == list(range(arch.VOCAB - len(arch.MARKERS), arch.VOCAB))
    plain = tokenizer.plain(path)
    for marker in ids:
        assert not set(plain.encode(f"a{marker}b", add_special_tokens=False).ids) & set(ids.values())
