"""Logits of the trainer's forward on the shipped pack, as a golden file: `python -m dsv41chat.nano.parity FILE.safetensors`.

`dsv41chat models verify nano --goldens FILE --atol 2e-4` compares the product engine with it. The text is made of our own tables only. Needs torch;
runs on the CPU in float32 with the rounding of caches off (with it on, a difference of 1e-7 at a midpoint changes a row in correct engines).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from . import arch, embedded_pack, export, model, tokenizer
from .tables.commands import COMMANDS

LENGTH, EVERY = 320, 32


def sample_ids(pack: Path) -> list[int]:
    """A pasted list of commands with two codes in it, two questions and their answers, cut to LENGTH tokens."""
    path = pack / "tokenizer.json"
    plain, mark = tokenizer.plain(path), tokenizer.marker_ids(path)
    lines = [f"The command {name} {does}." for name, does in COMMANDS[40:58]]
    lines.insert(5, "The code for Zora is 58213.")
    lines.insert(12, "By the way, the code for marble is 90457.")
    turns = (
        (" ".join(lines) + "\nwhat is the code for Zora?", "The code for Zora is 58213."),
        ("and the code for marble please", "The code for marble is 90457."),
    )
    ids = [mark[arch.BOS]]
    for user, answer in turns:
        ids += [mark[arch.USER], *plain.encode(user).ids, mark[arch.ASSISTANT], mark[arch.END_THINK], *plain.encode(answer).ids, mark[arch.EOS]]
    return (ids + ids[1:])[:LENGTH]


def trainer_logits(pack: Path, ids: list[int]) -> np.ndarray:
    """The trainer's forward in float32 on the values that the pack holds. -> [len(ids), vocab]"""
    path = pack / "tokenizer.json"
    net = model.Model(tokenizer.compressed_map(path), tokenizer.marker_ids(path)[arch.SYSTEM])
    weights, bias = export.read_weights(pack)
    model.cache_rounding(False)
    try:
        with torch.no_grad():
            for values, own in ((weights, net.p), (bias, net.bias)):
                for name, value in values.items():
                    own[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
            rows = torch.tensor([ids])
            hidden, _, _ = net.trunk(rows, torch.ones_like(rows), kl=False)
            return (hidden @ net.p["head"].t()).numpy()
    finally:
        model.cache_rounding(True)


def main() -> None:
    from safetensors.numpy import save_file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    torch.set_num_threads(1)
    pack = embedded_pack()
    ids = sample_ids(pack)
    positions = np.arange(EVERY - 1, LENGTH, EVERY, dtype=np.int32)
    logits = trainer_logits(pack, ids)[positions]
    save_file({"input_ids": np.array(ids, np.int32), "positions": positions, "logits": logits.astype(np.float32)}, str(parser.parse_args().file))


if __name__ == "__main__":
    main()
