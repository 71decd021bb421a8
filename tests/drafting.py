"""Drafted decode on tiny packs: packs with drafters, scripted drafters, and a decode loop that watches everything it should."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import PlainDrafter, Proposal
from dsv41chat.engine.draft.costs import DraftCosts, prior_costs
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth
from dsv41chat.engine.draft.verify import run_round
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.drafter import find_drafter
from dsv41chat.engine.pack.index import read_header
from dsv41chat.engine.sampling import SamplingParams, choose
from dsv41chat.engine.target import Target
from dsv41chat.nano.export import write_safetensors

DATA = Path(__file__).parent / "data"
# Tokens of a prompt and of an answer in the contracts.
PROMPT, COUNT = 11, 26
SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 0.9, "top_p": 0.9},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.3},
}


def settings(name: str, seed: int = 0) -> SamplingParams:
    return SamplingParams(seed=seed, **SETTINGS[name])


# packs --------------------------------------------------------------------------------------------------------------------


def write_with_drafter(
    source: Path, folder: Path, kind: str | None, succession: dict[int, int] | None = None, stages: int = 3, seed: int = 9
) -> Path:
    """A copy of a tiny pack with random `kind` (dspark, mtp or None) tensors, a little taught: after token t it favours succession[t]."""
    config, tensors = json.loads((source / "config.json").read_text()), read_header(source / "model.safetensors")
    text, rng = config.get("text_config", config), np.random.default_rng(seed)
    vocab, d = text["vocab_size"], text["hidden_size"]
    text["hc_sinkhorn_iters"] = 2  # half of a tiny model's time otherwise, and of no interest here
    if kind == "dspark":
        text |= {
            "dspark_block_size": 5, "dspark_noise_token_id": 5, "dspark_target_layer_ids": list(range(text["num_hidden_layers"]))[-3:],
            "dspark_markov_rank": vocab, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2, "num_nextn_predict_layers": stages,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for extra in source.glob("engram_token_map.json"):
        (folder / extra.name).write_bytes(extra.read_bytes())
    made = _drafter_tensors(folder, kind, stages, rng) if kind else {}
    tensors = release_tensors(tensors) if config["model_type"] == "deepseek_v4" else tensors
    if succession:
        teach = _teach_markov if kind == "dspark" else _teach_block
        teach(made, succession, vocab, d, tensors)
    old = [(name, ref.dtype, np.array(ref.bytes()).reshape(-1)) for name, ref in tensors.items()]
    shapes = {name: ref.shape for name, ref in tensors.items()}
    new = [(name, "F32", np.ascontiguousarray(value, np.float32)) for name, value in made.items()]
    write_safetensors(folder / "model.safetensors", [(n, t, _Shaped(a, shapes[n])) for n, t, a in old] + new)
    return folder


class _Shaped:
    """Raw bytes that are written under another shape."""

    def __init__(self, raw: np.ndarray, shape: tuple[int, ...]):
        self.raw, self.shape, self.nbytes = raw, shape, raw.nbytes

    def __array__(self, dtype=None, copy=None):
        return self.raw


def _drafter_tensors(folder: Path, kind: str, stages: int, rng) -> dict[str, np.ndarray]:
    """Random values for every tensor that the gate asks for, found by asking it with empty headers."""
    from dsv41chat.engine.config import family_of, parse_v41
    from dsv41chat.engine.config_v4 import parse_v4
    from dsv41chat.engine.pack import drafter

    outer = json.loads((folder / "config.json").read_text())
    c = parse_v4(outer) if family_of(outer) == "v4" else parse_v41(outer)
    plan = drafter._dspark_plan(c, list(range(stages))) if kind == "dspark" else drafter._mtp_plan(c, [0])
    out = {}
    for name, want in plan.expected.items():
        size = 1.0 if name.endswith(("_base", "attn_sink", "gate.bias")) else want.shape[-1] ** -0.5
        size *= 0.1 if "confidence" in name else 1.0  # undecided, so that the adaptive depth tries
        value = rng.standard_normal(want.shape) * size
        out[name] = 1 + 0.1 * value if name.endswith(("norm.weight", "_scale")) else value
    return out


def _teach_markov(made: dict, succession: dict[int, int], vocab: int, d: int, tensors) -> None:
    embed = next(n for n in made if n.endswith(("markov_head.embed.weight", "markov_w1.weight")))
    head = next(n for n in made if n.endswith(("markov_head.head.weight", "markov_w2.weight")))
    made[embed] = np.eye(vocab)
    made[head] = np.zeros((vocab, vocab))
    for token, following in succession.items():
        made[head][following, token] = 40.0


def _teach_block(made: dict, succession: dict[int, int], vocab: int, d: int, tensors) -> None:
    """The block passes its embedding projection through, and that turns each token into the head row of its successor."""
    from dsv41chat.engine.pack.matrix import floats

    embed, head = floats(tensors["embed.weight"]), floats(tensors["head.weight"])
    pairs = list(succession.items())[: d - 4]
    x = np.stack([embed[t] / np.sqrt((embed[t] ** 2).mean() + 1e-6) for t, _ in pairs])
    y = np.stack([head[f] / np.linalg.norm(head[f]) for _, f in pairs]) * 3
    made["mtp.0.e_proj.weight"] = np.linalg.lstsq(x, y, rcond=None)[0].T
    made["mtp.0.enorm.weight"], made["mtp.0.norm.weight"] = np.ones(d), np.ones(d)
    for name in made:
        if name.endswith(("h_proj.weight", "wo_b.weight", ".w2.weight")):
            made[name] = made[name] * 0.02


def succession(texts: Sequence[Sequence[int]]) -> dict[int, int]:
    """What follows each token most often, the most frequent tokens first."""
    after: dict[int, Counter] = {}
    for text in texts:
        for a, b in zip(text, text[1:]):
            after.setdefault(int(a), Counter())[int(b)] += 1
    order = sorted(after, key=lambda t: -after[t].total())
    return {t: after[t].most_common(1)[0][0] for t in order}


def load(folder: Path, dtype: mx.Dtype = mx.float32, rounded: bool = False, routes: str = "stock"):
    """(trunk, draft model or None) of a tiny pack; rounded: with the family's rounding of its window rows."""
    pack = open_pack(folder)
    trunk = build_trunk(pack, dtype=dtype, cache_quant=rounded, qat_sim=rounded, routes=routes)
    return trunk, build_drafter(pack, trunk, rounded=rounded)


def found(folder: Path):
    pack = open_pack(folder)
    return find_drafter(pack.index.tensors, pack.config)


# drafters -----------------------------------------------------------------------------------------------------------------


class ScriptedDrafter(PlainDrafter):
    """Proposes from the known reply: guess(position, true id) -> id. Keeps the rows it was given, to be compared."""

    kind, block, window = "scripted", 5, 16
    needs_taps = True

    def __init__(self, text: Sequence[int], guess: Callable[[int, int], int], confidence: Callable[[int], float] | None = None):
        self.text, self.guess, self.confidence = list(text), guess, confidence
        self.rows: dict[int, tuple[bytes, int]] = {}

    def ingest(self, taps, first_pos, next_tokens):
        taps = np.array(taps.astype(mx.float32))
        assert len(taps) == len(next_tokens), "as many rows as committed tokens"
        for i, token in enumerate(next_tokens):
            self.rows[first_pos + i] = taps[i].tobytes(), int(token)

    def propose(self, pending, n, want, sampling):
        assert self.text[n] == pending, "the pending token is the one that plain decode chose"
        assert sorted(self.rows) == list(range(n)), "the drafter holds the committed rows and no others"
        true = self.text[n + 1 : n + 1 + want]
        ids = tuple(self.guess(n + 1 + j, t) for j, t in enumerate(true))
        return Proposal(ids, tuple(self.confidence(j) for j in range(len(ids))) if self.confidence else None)

    def truncate(self, n):
        self.rows = {p: v for p, v in self.rows.items() if p < n}


def oracle(text, vocab):
    return ScriptedDrafter(text, lambda position, true: true)


def always_wrong(text, vocab):
    return ScriptedDrafter(text, lambda position, true: (true + 1) % vocab)


def random_guesses(text, vocab, seed: int = 1, chance: float = 0.6):
    """Each guess is right with `chance`, decided by its position alone."""
    right = np.random.default_rng(seed).random(4096) < chance
    return ScriptedDrafter(text, lambda position, true: true if right[position] else (true + 1 + position % 7) % vocab)


def prefix_right(text, vocab, count: int, start: int):
    """Guesses that are right up to every (count + 1)-th position from `start`: each round of enough depth keeps exactly `count`."""
    return ScriptedDrafter(text, lambda position, true: (true + 1) % vocab if (position - start) % (count + 1) == 0 else true)


class RandomDepth(FixedDepth):
    """Another depth every round."""

    def __init__(self, most: int, seed: int):
        super().__init__(most)
        self.rng = np.random.default_rng(seed)

    def ask(self, limit):
        return min(int(self.rng.integers(0, self.depth + 1)), limit)


def adaptive(trunk, block: int) -> DepthPolicy:
    """The shipped policy, with nothing measured yet."""
    costs = DraftCosts(*prior_costs(block, trunk.config.n_routed_experts, trunk.config.num_experts_per_tok))
    return DepthPolicy(block, costs)


# the loop -----------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """text: prompt and everything chosen. states: digest of all that a later row can see, by number of committed rows."""

    text: list[int]
    prompt: int
    target: Target
    drafter: object
    rounds: list = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    deepest: int = 0

    @property
    def ids(self) -> list[int]:
        return self.text[self.prompt :]

    @property
    def accepts(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def rejects(self) -> int:
        return sum(r.proposed > r.accepted and r.ended is None for r in self.rounds)


def digest(target: Target) -> str:
    """All lanes, cut to what can still be seen, as one hash."""
    h = hashlib.sha256(str(target.n).encode())
    for name, value in sorted(target.lane.state().items()):
        raw = value if isinstance(value, np.ndarray) else np.array(value.view(mx.uint8))
        h.update(name.encode() + raw.tobytes())
    return h.hexdigest()


def decode(
    trunk, prompt: Sequence[int], sampling: SamplingParams, count: int, drafter=None, depth=None, *, states: bool = False, cut=None, target=None
) -> Run:
    """`count` tokens after `prompt`, whose last id is the first pending token. cut(ids) -> reason ends it; None goes on.

    drafter None is plain decode: the same loop, no drafter, depth 0. The clock ticks once per look, so every part of a round takes
    as long as every other on any machine, and the adaptive policy drafts.
    """
    drafter, depth = drafter or PlainDrafter(), depth or FixedDepth(0)
    run = Run([int(i) for i in prompt], len(prompt), target or Target(trunk), drafter)
    target, counts = run.target, Counter()
    if target.n < len(prompt) - 1:
        trial = target.rows(prompt[target.n : -1], logits_from=None, want_taps=drafter.needs_taps)
        target.commit(trial, trial.count)
        drafter.ingest(trial.taps, trial.start, run.text[trial.start + 1 : trial.start + trial.count + 1])
    select = lambda row, position: choose(row, position, counts, sampling)

    def emit(token: int) -> str | None:
        run.text.append(token)
        counts[token] += 1
        return (cut(run.ids) if cut else None) or ("length" if len(run.ids) >= count else None)

    ended, ticks = None, itertools.count()
    clock = lambda: next(ticks) / 100
    while ended is None:
        limit = count - len(run.ids) - 1
        result = run_round(target, drafter, depth, run.text[-1], limit, sampling, select, emit, lambda: False, clock)
        run.rounds.append(result)
        run.deepest = max(run.deepest, result.proposed)
        ended = result.ended
        if states:
            run.states[target.n] = digest(target)
    return run


# a pack and its plain runs -----------------------------------------------------------------------------------------------


class Family:
    """A tiny pack without a drafter, and plain decode's runs on it."""

    def __init__(self, name: str, folder, dtype=mx.float32, routes: str = "stock"):
        self.folder = write_with_drafter(DATA / name, folder / name, None)
        self.trunk, _ = load(self.folder, dtype, routes=routes)
        self.vocab = self.trunk.config.vocab_size
        self.trunk.tap_layers = tuple(range(self.trunk.config.num_hidden_layers))[-3:]
        self.plain = lru_cache(None)(self._plain)
        self.with_states = lru_cache(None)(lambda *key: self._plain(*key, states=True))

    def prompt(self, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.vocab - 2, PROMPT).tolist()

    def _plain(self, setting: str, seed: int, count: int = COUNT, **options):
        return decode(self.trunk, self.prompt(seed), settings(setting, seed), count, **options)

    def drafted(self, setting: str, seed: int, depth, make, count: int = COUNT, **options):
        """make(text, vocab) -> drafter, from plain decode's own text."""
        text = self.plain(setting, seed, count).text
        depth = adaptive(self.trunk, 5) if depth == "auto" else FixedDepth(depth) if isinstance(depth, int) else depth
        return decode(self.trunk, self.prompt(seed), settings(setting, seed), count, make(text, self.vocab), depth, **options)
