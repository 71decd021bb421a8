"""The pack's layout with seeded random weights: `python -m dsv41chat.nano.random_pack TOKENIZER_JSON FOLDER [--seed N]`.

Used before a training run exists and by tests of the exporter. Such a pack answers nonsense; its card says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import arch, export

CARD = """# nano (random weights)

The architecture of the embedded model with seeded random weights (seed {seed}). It was not trained and answers nonsense.
"""


def write(tokenizer_json: Path, folder: Path, seed: int = arch.SEED) -> None:
    """A complete pack folder from a tokenizer file; the same arguments give the same bytes."""
    export.write_settings(folder, tokenizer_json)
    export.write_weights(folder, *arch.initial(seed))
    (folder / "MODEL_CARD.md").write_text(CARD.format(seed=seed), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=arch.SEED)
    a = parser.parse_args()
    write(a.tokenizer, a.folder, a.seed)


if __name__ == "__main__":
    main()
