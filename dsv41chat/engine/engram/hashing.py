"""Token ids -> table rows. Depends on ids only, so rows of a whole prompt or draft are known before any layer runs."""

from __future__ import annotations

import itertools
import math

import numpy as np

from dsv41chat.engine.config import EngramConfig
from dsv41chat.engine.errors import PackDamaged

DEAD = -1


def _primes_from(start: int):
    return (v for v in itertools.count(max(2, start)) if all(v % d for d in range(2, math.isqrt(v) + 1)))


class NgramHasher:
    """token_map int [vocab]: compressed id per token id. Columns of a row: n-gram size major, then head.

    Each (layer, size, head) has its own prime, dealt in ascending order from `vocab_size` on; a column's rows start at the sum of
    the primes before it. Multipliers are odd int64 from a generator seeded by the layer. Products cannot overflow int64.
    """

    def __init__(self, config: EngramConfig, token_map: np.ndarray, image_token_id: int):
        self.map = np.asarray(token_map, np.int64)
        distinct = len(np.unique(self.map))
        if distinct != config.compressed_vocab_size:
            raise PackDamaged(
                f"the engram token map has {distinct:,} compressed ids, $.engram_compressed_vocab_size says {config.compressed_vocab_size:,}",
                "tokenizer.json and config.json are not of the same build",
            )
        self.lookback, self.image = config.max_ngram, image_token_id
        self.pad = int(self.map[config.pad_token_id])
        primes, bound = _primes_from(config.vocab_size), max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
        shape = (config.max_ngram - 1, config.n_heads)
        self.primes, self.bases, self.multipliers = [], [], []
        for layer, rows in zip(config.layer_ids, config.table_rows):
            p = np.array([next(primes) for _ in range(math.prod(shape))], np.int64)
            if p.sum() != rows:
                raise PackDamaged(f"layer {layer}: the primes of the engram columns sum to {p.sum():,}, $.engram_num_embeddings says {rows:,}")
            self.primes.append(p.reshape(shape))
            self.bases.append((np.cumsum(p) - p).reshape(shape))
            draws = np.random.default_rng(10007 * layer).integers(0, bound, config.max_ngram, dtype=np.int64)
            self.multipliers.append(2 * draws + 1)

    def compress(self, ids: np.ndarray) -> np.ndarray:
        """int64 [n]; DEAD for tokens of an image span."""
        ids = np.asarray(ids, np.int64)
        return np.where(ids == self.image, DEAD, self.map[ids])

    def rows(self, history: list[int] | np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Row addresses int64 [layers, n, columns] for `ids`. history: the ids before them (at least the last max_ngram - 1).

        A lookback past the start or across a dead token stays blocked for all longer lookbacks and reads as the pad id.
        """
        reach = self.lookback - 1
        before = np.asarray(history[max(0, len(history) - reach) :], np.int64)
        comp = np.concatenate([np.full(reach, DEAD, np.int64), self.compress(before), self.compress(ids)])
        n, blocked, terms = len(ids), np.zeros(len(ids), bool), []
        for k in range(self.lookback):
            t = comp[len(comp) - n - k : len(comp) - k]
            blocked = blocked | (t < 0)
            terms.append(np.where(blocked, self.pad, t))
        out = []
        for prime, base, mult in zip(self.primes, self.bases, self.multipliers):
            acc, columns = terms[0] * mult[0], []
            for k in range(1, self.lookback):
                acc = acc ^ (terms[k] * mult[k])
                columns.append(acc[:, None] % prime[k - 1] + base[k - 1])
            out.append(np.concatenate(columns, 1))
        return np.stack(out)
