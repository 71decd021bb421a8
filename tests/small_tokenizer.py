"""A small tokenizer with the embedded model's layout: other ids than a release, the same marker strings.

Ids 0, 1, 2 are BOS, EOS and pad (also in model.vocab, as in the releases), byte-level pieces follow, the other markers
are the last ids.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv41chat.engine.chat import markers
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.nano import embedded_pack

FIRST = (markers.BOS, markers.EOS, markers.PAD)
LAST = (
    markers.SYSTEM,
    markers.USER,
    markers.ASSISTANT,
    markers.THINK,
    markers.END_THINK,
    markers.DSML,
    markers.REMINDER,
    *markers.TASKS.values(),
    markers.IMAGE,
)
_CORPUS = ["The quick brown fox thinks; the lazy dog naps.", "A System User Assistant think title", "Příliš žluťoučký kůň 12345", "éÉeE  \n\n"] * 4


@cache
def small_tokenizer_json(pieces: int = 400) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, special_tokens=list(FIRST), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(spelling, normalized=False) for spelling in LAST])
    return tokenizer.to_str()


@cache
def small_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(small_tokenizer_json().encode(), "small/tokenizer.json")


def embedded_bytes() -> bytes:
    """tokenizer.json of the embedded pack."""
    return (embedded_pack() / "tokenizer.json").read_bytes()


@cache
def embedded_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(embedded_bytes(), "nano/tokenizer.json")
