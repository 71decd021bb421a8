"""The promises of the engine, checked on a loaded build: the computing part of `eval selfcheck`.

decode    token by token gives the logits that a prefill of many rows gives, and the same state
rollback  rows that were tried and not kept leave no trace
drafted   drafted answers have the ids of plain ones, greedy and sampled
resume    an answer from a state that was written to disk and read again is the one that was never interrupted

Bit-exact on every device: rollback, drafted (unless `engine.exact` is fast), resume. decode is bit-exact where a row's bits do not depend
on the rows beside it (the stock CPU route); elsewhere it must stay within a tolerance, and rows that choose another token are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.draft.base import Drafter, PlainDrafter, Proposal
from dsv41chat.engine.draft.depth import FixedDepth
from dsv41chat.engine.draft.verify import run_round
from dsv41chat.engine.sampling import SamplingParams, choose
from dsv41chat.engine.target import Target

if TYPE_CHECKING:
    from dsv41chat.engine import Engine, Session

CONTRACTS = {
    "decode": "decode == prefill", "rollback": "rejected rows never happened", "drafted": "drafted == plain",
    "resume": "resumed == uninterrupted",
}  # fmt: skip
SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=7)}
NEAR_TIE = 2e-3
# Where rows depend on each other: largest relative L2 distance of all rows of logits together, by dtype. A single row may be ROW times as
# far: where a rounding flips a choice of entries or experts at a near-tie, it moves that row alone. The embedded model in bfloat16 is 0.02
# to 0.05 from itself in float32, single rows up to 0.17.
TOLERANCE, ROW = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}, 5
ANSWER_TOKENS = 48
_SPOT, _TRIED, _SHOWN = 24, 6, 8


@dataclass
class Compared:
    """Rows of logits against each other. worst: largest absolute difference; far: rows that no tolerance covers; apart, size: sums of squares
    of differences and of the first rows; near_ties: rows whose two best logits lie within NEAR_TIE; flips: rows that choose another token,
    as {position, ids, first, second: both logits}."""

    tolerance: float | None
    rows: int = 0
    worst: float = 0.0
    far: int = 0
    apart: float = 0.0
    size: float = 0.0
    near_ties: int = 0
    flips: list[dict[str, Any]] = field(default_factory=list)

    def add(self, first: np.ndarray, second: np.ndarray, position: int) -> None:
        """first, second float32 [n, vocab] of the positions `position`.."""
        difference = np.abs(first - second)
        self.rows += len(first)
        self.worst = max(self.worst, float(difference.max()))
        if self.tolerance is None:
            self.far += int((difference.max(1) > 0).sum())
        else:
            apart, size = np.linalg.norm(first - second, axis=1), np.linalg.norm(first, axis=1)
            self.far += int((apart > ROW * self.tolerance * size).sum())
            self.apart, self.size = self.apart + float((apart**2).sum()), self.size + float((size**2).sum())
        self.near_ties += sum(near_tie(row) for row in first)
        for i in np.flatnonzero(first.argmax(1) != second.argmax(1)):
            self.flips.append(flip(position + int(i), first[i], second[i], int(first[i].argmax()), int(second[i].argmax())))

    def verdict(self, **more: Any) -> dict[str, Any]:
        together = float(np.sqrt(self.apart / self.size)) if self.size else 0.0
        ok = not self.far and together <= (self.tolerance or 0.0) and more.get("state_equal", True)
        found = {"ok": ok, "rows": self.rows, "max_abs": self.worst, "rows_beyond": self.far, "near_ties": self.near_ties}
        found |= {} if self.tolerance is None else {"relative_l2": float(f"{together:.3g}")}
        return found | {"flips": self.flips[:_SHOWN], "flipped": len(self.flips)} | more


def near_tie(row: np.ndarray) -> bool:
    second, first = np.partition(row, len(row) - 2)[-2:]
    return bool(first - second < NEAR_TIE)


def flip(position: int, first: np.ndarray, second: np.ndarray, a: int, b: int) -> dict[str, Any]:
    """Two rows for one position that choose tokens a and b, with both logits of both."""
    logits = lambda row: [round(float(row[a]), 6), round(float(row[b]), 6)]
    return {"position": position, "ids": [a, b], "first": logits(first), "second": logits(second)}


def plan(engine: Engine, tokens: int) -> Iterator[tuple[str, str, Callable[[Path], dict[str, Any]]]]:
    """(contract, what of it, check) in order; a check gets a scratch folder and gives JSON values with `ok`."""
    ids = text(engine, tokens)
    plain = cache(lambda name: plain_answer(engine, ids, name))
    yield "decode", f"{tokens} tokens", lambda folder: decode_is_prefill(engine, ids)
    yield "rollback", f"up to {_TRIED} rows", lambda folder: rollback(engine, ids)
    for name in SAMPLINGS:
        for mode in _modes(engine):
            yield "drafted", f"{name}, {mode}", lambda folder, name=name, mode=mode: drafted_is_plain(engine, ids, name, mode, plain(name))
    for at in sorted({min(37, tokens // 2), tokens // 2 + 1, tokens - 1}):
        yield "resume", f"after {at} tokens", lambda folder, at=at: resumed_is_uninterrupted(engine, ids, at, folder)


def text(engine: Engine, tokens: int) -> list[int]:
    """The shipped chats as this build's chat would have them, over again if more is asked for."""
    from dsv41chat.engine.chat.markers import BOS
    from dsv41chat.engine.convert.calibrate import DEFAULT_TEXT, text_ids

    ids, _ = text_ids(DEFAULT_TEXT, engine.tokenizer, engine.family)
    return [engine.tokenizer.marker(BOS), *(ids * -(-tokens // len(ids)))][:tokens]


def decode_is_prefill(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    """Two lanes over the same ids in the same chunks; the second takes several stretches row by row: the first rows, those past the window,
    those past the selection, the last ones."""
    c, tokens = engine.trunk.config, len(ids)
    starts = sorted({max(0, min(tokens - _SPOT, at)) for at in (0, c.sliding_window + 3, c.index_topk + 5, tokens)})
    compared = Compared(None if engine.row_invariant else _tolerance(engine))
    many, single = Target(engine.trunk), Target(engine.trunk)
    cuts = sorted({0, tokens, *range(0, tokens, engine.prefill_chunk), *(at for s in starts for at in (s, min(s + _SPOT, tokens)))})
    for a, b in zip(cuts, cuts[1:]):
        spot = any(s <= a < s + _SPOT for s in starts)
        rows = _run(many, ids[a:b], spot)
        other = [_run(single, [token], True) for token in ids[a:b]] if spot else [_run(single, ids[a:b], False)]
        if spot:
            compared.add(rows, np.concatenate(other), a)
    states = (_state(many), _state(single))
    return compared.verdict(exact=engine.row_invariant, **({"state_equal": states[0] == states[1]} if engine.row_invariant else {}))


def rollback(engine: Engine, ids: Sequence[int], steps: int = 16) -> dict[str, Any]:
    """Two lanes row by row; before each row the second tries wrong ones and keeps none. Calls that count have one row on both."""
    compared, rng, vocab = Compared(None), np.random.default_rng(5), engine.trunk.config.vocab_size
    plain, tried = Target(engine.trunk), Target(engine.trunk)
    start = len(ids) - steps
    for target in (plain, tried):
        for a in range(0, start, engine.prefill_chunk):
            _run(target, ids[a : min(start, a + engine.prefill_chunk)], False)
    for n in range(start, len(ids)):
        count = min(1 + n % _TRIED, tried.lane.roll)
        trial = tried.rows([ids[n], *rng.integers(3, vocab, count).tolist()][:count])
        tried.commit(trial, 0)
        compared.add(_run(plain, [ids[n]], True), _run(tried, [ids[n]], True), n)
    return compared.verdict(exact=True, state_equal=_state(plain) == _state(tried))


@dataclass
class Trace:
    """ids that were chosen, and by position the logits row that chose."""

    ids: list[int] = field(default_factory=list)
    rows: dict[int, np.ndarray] = field(default_factory=dict)


class Misguided:
    """A drafter that knows the plain answer and spoils some guesses, so that rounds are cut at every place."""

    kind, window, needs_taps = "scripted", 0, False

    def __init__(self, answer: Sequence[int], start: int, block: int, vocab: int):
        self._answer, self._start, self.block, self._vocab = list(answer), start, block, vocab

    def propose(self, pending: int, n: int, want: int, sampling: SamplingParams) -> Proposal:
        at = n - self._start
        guesses = self._answer[at : at + want]
        spoiled = at % (len(guesses) + 1)
        return Proposal(tuple((g + 1) % self._vocab if i == spoiled else g for i, g in enumerate(guesses)))

    def ingest(self, taps: Any, first_pos: int, next_tokens: Sequence[int]) -> None:
        return

    def truncate(self, n: int) -> None:
        return


def answer(session: Session, ids: Sequence[int], drafter: Drafter, depth: Any, sampling: SamplingParams) -> Trace:
    """The next ANSWER_TOKENS tokens after ids, whatever they are; the loop of a turn without its stops."""
    session.prefill(ids)
    trace, counts, count = Trace(), {}, ANSWER_TOKENS

    def select(row: np.ndarray, position: int) -> int:
        trace.rows[position] = row.copy()
        return choose(row, position, counts, sampling)

    def emit(token: int) -> str | None:
        trace.ids.append(token)
        counts[token] = counts.get(token, 0) + 1
        return "length" if len(trace.ids) >= count else None

    pending, ended = ids[-1], None
    while ended is None:
        found = run_round(session.target, drafter, depth, pending, count - len(trace.ids) - 1, sampling, select, emit, lambda: False)
        pending, ended = found.emitted[-1], found.ended
    return trace


def plain_answer(engine: Engine, ids: Sequence[int], name: str) -> Trace:
    return answer(engine.new_session(), ids, PlainDrafter(), FixedDepth(0), SAMPLINGS[name])


def drafted_is_plain(engine: Engine, ids: Sequence[int], name: str, mode: str, plain: Trace) -> dict[str, Any]:
    """mode: adaptive, depth N, or misled. plain: the answer without a drafter."""
    sampling, session = SAMPLINGS[name], engine.new_session()
    if mode == "misled":
        engine.drafting.depth("auto", session.policy)  # puts row by row what must run so
        block = engine.drafting.block or 3
        drafter, depth = Misguided(plain.ids, len(ids) - 1, block, engine.trunk.config.vocab_size), FixedDepth(block)
    else:
        drafter, depth = session.drafter, engine.drafting.depth("auto" if mode == "adaptive" else int(mode.split()[1]), session.policy)
    found = answer(session, ids, drafter, depth, sampling)
    result = same_answer(plain, found, len(ids))
    fault = getattr(session.drafter, "fault", None)
    if engine.drafting.exact == "fast" and not result["ok"] and result["near_tie"]:
        result |= {"ok": True, "note": "engine.exact is fast: they part at a near-tie"}
    return result | ({"ok": False, "note": fault} if fault else {})


def same_answer(first: Trace, second: Trace, start: int) -> dict[str, Any]:
    """Ids of two answers; where they part, both tokens and both logits. start: position of the first token."""
    ties = sum(near_tie(row) for row in first.rows.values())
    differ = next((i for i, (a, b) in enumerate(zip(first.ids, second.ids)) if a != b), None)
    if differ is None and len(first.ids) == len(second.ids):
        return {"ok": True, "tokens": len(first.ids), "near_ties": ties, "flips": [], "flipped": 0, "near_tie": False}
    found = {"ok": False, "tokens": differ if differ is not None else min(len(first.ids), len(second.ids)), "near_ties": ties}
    rows = [trace.rows.get(start + found["tokens"]) for trace in (first, second)]
    if differ is None or rows[0] is None or rows[1] is None:
        return found | {"flips": [], "flipped": 1, "near_tie": False, "note": "the two lanes are not at the same position"}
    where = flip(start + differ, *rows, first.ids[differ], second.ids[differ])
    return found | {"flips": [where], "flipped": 1, "near_tie": near_tie(rows[0])}


def resumed_is_uninterrupted(engine: Engine, ids: Sequence[int], at: int, folder: Path) -> dict[str, Any]:
    """The state after `at` tokens goes to a prompt cache on disk and comes back into another session."""
    from dsv41chat.ui.states import States, StateTurn

    prompt, turn = ids[: at + 1], StateTurn(f"selfcheck {at}")
    session, other = engine.new_session(), engine.new_session()
    states = States(folder, 1 << 34, min_free_bytes=0)
    states.bind(engine, "selfcheck")
    try:
        session.prefill(prompt)
        states.keep(session, "P", turn)
        states.settle(300)
        resumed = states.resume(other, prompt, turn)
    finally:
        states.close()
    if resumed.source != "disk" or resumed.tokens != at:
        return {"ok": False, "tokens": 0, "near_ties": 0, "flips": [], "flipped": 0, "note": f"the state was not found again ({resumed.source})"}
    compared, result = Compared(None), None
    traces = [answer(one, prompt, PlainDrafter(), FixedDepth(0), SAMPLINGS["seeded"]) for one in (session, other)]
    result = same_answer(*traces, len(prompt))
    shared = [position for position in sorted(traces[0].rows) if position - len(prompt) <= result["tokens"] and position in traces[1].rows]
    for position in shared:
        compared.add(traces[0].rows[position][None], traces[1].rows[position][None], position)
    equal = _state(session.target) == _state(other.target)
    return result | {"ok": result["ok"] and not compared.far and equal, "max_abs": compared.worst, "state_equal": equal}


def _modes(engine: Engine) -> list[str]:
    """Of drafting: the pack's drafter in every way, and one that is often wrong."""
    block = engine.drafting.block
    own = ["adaptive", *(f"depth {n}" for n in sorted({1, block}))] if block else []
    # Without a drafter nothing has made sure that several rows give the bits of one.
    return [*own, "misled"] if block or engine.row_invariant else []


def _tolerance(engine: Engine) -> float:
    return TOLERANCE[str(engine.trunk.dtype).rsplit(".", 1)[-1]]


def _run(target: Target, ids: Sequence[int], logits: bool) -> np.ndarray | None:
    trial = target.rows(list(ids), logits_from=0 if logits else None)
    found = np.array(trial.logits) if logits else None
    target.commit(trial, len(ids))
    return found


def _state(target: Target) -> dict[str, bytes]:
    """What later rows can see, as bytes."""
    return {k: np.array(v if isinstance(v, np.ndarray) else v.view(mx.uint8)).tobytes() for k, v in target.lane.state().items()}
