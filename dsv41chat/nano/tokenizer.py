"""The embedded model's tokenizer: byte-level BPE with 4,096 ids, trained on our own rendered corpus without marker strings.

Ids 0, 1, 2 are BOS, EOS and pad, as in the release (there, too, they are entries of `model.vocab`); the other markers are the last ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from . import arch


def train(lines: Iterable[str], path: Path) -> None:
    """Write `tokenizer.json`. The same lines in the same order give the same bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tk.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=arch.VOCAB - len(arch.MARKERS),
        special_tokens=[arch.BOS, arch.EOS, arch.PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tk.train_from_iterator(lines, trainer)
    tk.add_tokens([AddedToken(m, special=False, normalized=True) for m in arch.MARKERS])
    if tk.get_vocab_size() != arch.VOCAB:
        raise ValueError(f"the corpus gives {tk.get_vocab_size()} ids, {arch.VOCAB} are needed")
    path.parent.mkdir(parents=True, exist_ok=True)
    tk.save(str(path))


def marker_ids(path: Path) -> dict[str, int]:
    """Spelling -> id of every added token of a `tokenizer.json`."""
    return {t["content"]: t["id"] for t in json.loads(Path(path).read_text(encoding="utf-8"))["added_tokens"]}


def plain(path: Path):
    """The tokenizer without added tokens: text that spells a marker stays text."""
    from tokenizers import Tokenizer

    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    spec["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(spec))


def compressed_map(path: Path) -> list[int]:
    """Engram token map, one compressed id per token id (the release's fold; the trainer must run without the engine's packages)."""
    from tokenizers import Regex, Tokenizer
    from tokenizers import normalizers as nz

    guard = "\ue000"  # keeps a lone space from being stripped
    fold = nz.Sequence(
        [
            nz.NFKC(),
            nz.NFD(),
            nz.StripAccents(),
            nz.Lowercase(),
            nz.Replace(Regex(r"[ \t\r\n]+"), " "),
            nz.Replace(Regex(r"^ $"), guard),
            nz.Strip(),
            nz.Replace(guard, " "),
        ]
    )
    tk, keys, out = Tokenizer.from_file(str(path)), {}, []
    for i in range(tk.get_vocab_size(with_added_tokens=True)):
        text = tk.decode([i], skip_special_tokens=False)
        key = tk.id_to_token(i) if "�" in text else fold.normalize_str(text) or text
        out.append(keys.setdefault(key, len(keys)))
    return out
