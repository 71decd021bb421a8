"""`Session`: one conversation's timeline on an engine, and the loop that answers a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from dsv41chat.engine.answer import Answer
from dsv41chat.engine.chat.encode import EncodedPrompt
from dsv41chat.engine.draft.base import Drafter, PlainDrafter
from dsv41chat.engine.draft.depth import DepthPolicy, FixedDepth
from dsv41chat.engine.draft.verify import run_round
from dsv41chat.engine.errors import ContextFull, PackIncomplete
from dsv41chat.engine.events import Done, DraftRound, Piece, Prefill, Residency
from dsv41chat.engine.lane import LaneMark
from dsv41chat.engine.sampling import SamplingParams, choose
from dsv41chat.engine.target import Target

if TYPE_CHECKING:
    from dsv41chat.engine.engine import Engine

_PREFILL_EVENT_S = 0.25

Event = Residency | Prefill | Piece | DraftRound | Done


class Session:
    """Sessions share the engine's weights and nothing else; they may interleave round by round.

    rows_run: trunk rows this session has computed, all turns together. policy: its adaptive depth, which learns from turn to turn.
    prefill_rate: tokens/s of the last prefill that was long enough to measure.
    """

    def __init__(self, engine: Engine, drafter: Drafter, policy: DepthPolicy):
        self.engine, self.drafter, self.policy = engine, drafter, policy
        self.target = Target(engine.trunk)
        self.rows_run = 0
        self.prefill_rate: float | None = None
        self._mark: tuple[LaneMark, dict[str, mx.array]] | None = None  # where the newest prompt ended

    def generate(
        self,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        max_answer_tokens: int | None = None,
        stop: Sequence[str] = (),
        draft: str | int = "auto",
        loop_stop: bool = True,
        cancel: Callable[[], bool] = lambda: False,
        marks: Sequence[int] = (),
        on_mark: Callable[[int], None] = lambda n: None,
    ) -> Iterator[Event]:
        """Answer `prompt`. Yields Residency, Prefill..., (Piece | DraftRound)..., Done.

        draft: auto, off or a fixed depth; it changes how fast the answer comes and never what it is.
        max_tokens counts every emitted id, the stop id included; max_answer_tokens those after the thinking part.
        cancel is polled at chunk and round borders and ends the turn with finish `cancelled`.
        Raises ContextFull before any work, and EngineError with the lane at its last commit.
        marks: prompt positions where a chunk must end; on_mark(n) is called there, with the lane at its commit.
        """
        if self.engine.tokenizer is None:
            words = f"{self.engine.name} has no tokenizer.json: it can be verified, not talked to"
            raise PackIncomplete(words, "copy tokenizer.json into the build's folder")
        room = self.engine.context_limit - len(prompt.ids)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(prompt.ids):,} tokens, this build's context holds {self.engine.context_limit:,}",
                "start a new conversation, or raise --context if memory admits",
            )
        if self.engine.tables is not None:
            self.engine.tables.begin_request()
        answer = Answer(self.engine.tokenizer, prompt, tuple(stop), min(max_tokens, room), loop_stop, max_answer_tokens)
        yield from _Turn(self, prompt, sampling, answer, draft, cancel, _Marks(marks, on_mark)).run()

    def held(self, ids: Sequence[int]) -> int:
        """How many of the first `ids` the lane holds already."""
        return self.target.lane.common_prefix(ids)

    def reach(self, ids: Sequence[int]) -> int:
        """The position that `reuse` would bring the lane to; changes nothing."""
        lane = self.target.lane
        keep = min(lane.common_prefix(ids), len(ids) - 1)
        if keep == lane.n or keep >= lane.high - lane.roll:
            return keep
        return self._mark[0].n if self._mark is not None and self._mark[0].n <= keep and lane.holds(self._mark[0]) else 0

    def reuse(self, ids: Sequence[int]) -> int:
        """Bring the lane to the longest prefix it can share with `ids`, at most all but the last id; returns its length."""
        lane = self.target.lane
        keep = min(lane.common_prefix(ids), len(ids) - 1)
        if keep == lane.n or lane.truncate(keep):
            pass
        elif self._mark is not None and self._mark[0].n <= keep and lane.rewind(self._mark[0]):
            self.drafter.load(self._mark[1], lane.n)
            return lane.n
        else:
            self.clear()
        if lane.n == 0:
            self.drafter.reset()
        else:
            self.drafter.truncate(lane.n)
        return lane.n

    def clear(self) -> None:
        """Back to an empty timeline."""
        self.target.drop()
        self.target.lane.reset()
        self.drafter.reset()
        self._mark = None

    def mark_prompt(self) -> None:
        """Remember this position: a retry, or the next prompt without this answer's thinking part, comes back to it."""
        self._mark = self.target.lane.mark(), self.drafter.state()

    def prefill(
        self,
        ids: Sequence[int],
        *,
        cancel: Callable[[], bool] = lambda: False,
        marks: Sequence[int] = (),
        on_mark: Callable[[int], None] = lambda n: None,
    ) -> bool:
        """Bring the lane to all of `ids` but the last, for a prompt that will go on from there. False when cancelled at a chunk border."""
        if self.engine.tables is not None:
            self.engine.tables.begin_request()
        self.reuse(ids)
        for _ in self.advance(ids, cancel, _Marks(marks, on_mark), self.drafter):
            continue
        return self.target.n == len(ids) - 1

    def advance(self, ids: Sequence[int], cancel: Callable[[], bool], marks: _Marks, drafter: Drafter) -> Iterator[int]:
        """Run all of ids from n on but the last, in chunks that end on the engine's grid and at marks; yields n after each.

        Ends early when cancelled. The last id tells the drafter what follows the last row.
        """
        chunk, target, end = self.engine.prefill_chunk, self.target, len(ids) - 1
        # Rows further back than the drafter's window are never seen by a pass after the prompt.
        first = end - drafter.window
        while target.n < end and not cancel():
            n = target.n
            stop = marks.cut(n, min(end, (n // chunk + 1) * chunk))
            ahead = ids[stop : max(stop + 1, min(end, stop + chunk))]
            drafted = drafter.needs_taps and stop > first
            trial = target.rows(ids[n:stop], logits_from=None, want_taps=drafted, ahead=ahead)
            target.commit(trial, stop - n)
            self.rows_run += stop - n
            if drafted:
                seen = max(n, first)
                drafter.ingest(trial.taps[seen - n :], seen, ids[seen + 1 : stop + 1])
            marks.reached(stop)
            yield stop


class _Marks:
    """Positions at which a chunk must end."""

    def __init__(self, positions: Sequence[int] = (), reached: Callable[[int], None] = lambda n: None):
        self._positions, self._call = sorted(set(positions)), reached

    def cut(self, n: int, stop: int) -> int:
        return next((p for p in self._positions if n < p < stop), stop)

    def reached(self, n: int) -> None:
        if n in self._positions:
            self._call(n)


class _Turn:
    def __init__(self, session: Session, prompt: EncodedPrompt, sampling: SamplingParams, answer: Answer, draft, cancel, marks: _Marks):
        self.session, self.prompt, self.sampling, self.answer, self.cancel = session, prompt, sampling, answer, cancel
        self.marks = marks
        self.mode = draft
        self.depth = session.engine.drafting.depth(draft, session.policy)
        # A plain turn does no work for a drafter; the next drafted one begins with the rows that come then.
        plain = isinstance(self.depth, FixedDepth) and self.depth.depth == 0
        self.drafter = PlainDrafter() if plain else session.drafter
        self.cached = 0
        self.rounds = self.proposed = self.accepted = 0
        self.by_depth: list[list[int]] = []
        self.prefill_s = self.first_token_s = 0.0
        self.first_tokens = 0

    def run(self) -> Iterator[Event]:
        began = time.perf_counter()
        self.residency = self.session.engine.residency()
        yield self.residency
        self.tables_before = self.session.engine.table_counters()
        finish = yield from self._prefill(began)
        self.prefill_s = time.perf_counter() - began
        yield from self._residency_change()
        if finish is None:
            finish = yield from self._decode(began)
        self.answer.finish(finish)
        yield from self.answer.take()
        yield self._done(finish, time.perf_counter() - began - self.prefill_s)

    def _residency_change(self) -> Iterator[Event]:
        """Residency again when a table has turned cold or warm."""
        now = self.session.engine.residency()
        if [t.state for t in now.tables] != [t.state for t in self.residency.tables]:
            self.residency = now
            yield now

    def _prefill(self, began: float) -> Iterator[Event]:
        """All ids but the last one, in chunks that end on the engine's grid. Returns `cancelled` or None.

        The last id is the first round's pending token, so there is one decode loop.
        """
        session, ids = self.session, self.prompt.ids
        self.cached = session.reuse(ids)
        total, last_event = len(ids) - self.cached, 0.0
        for end in session.advance(ids, self.cancel, self.marks, self.drafter):
            now = time.perf_counter()
            if now - last_event >= _PREFILL_EVENT_S and end < len(ids) - 1:
                last_event = now
                yield Prefill(self.cached, end - self.cached, total, (end - self.cached) / (now - began))
        if session.target.n < len(ids) - 1:
            return "cancelled"
        if total > session.engine.prefill_chunk:
            session.prefill_rate = total / max(time.perf_counter() - began, 1e-9)
        session.mark_prompt()
        if self.cancel():
            return "cancelled"
        yield Prefill(self.cached, total, total, total / max(time.perf_counter() - began, 1e-9))
        return None

    def _decode(self, began: float) -> Iterator[Event]:
        session, answer = self.session, self.answer
        pending, ended, depth = self.prompt.ids[-1], None, None
        select = lambda row, position: choose(row, position, answer.counts, self.sampling)
        while ended is None:
            if self.cancel():
                return "cancelled"
            limit = answer.remaining - 1
            result = run_round(session.target, self.drafter, self.depth, pending, limit, self.sampling, select, answer.emit, self.cancel)
            if result is None:
                return "cancelled"
            if not self.rounds:
                # The prompt's last id runs in this round, so prefill ends here.
                self.first_tokens = len(result.emitted)
                self.prefill_s = self.first_token_s = time.perf_counter() - began
            self._count(result)
            pending, ended = result.emitted[-1], result.ended
            yield from answer.take()
            yield from self._residency_change()
            if result.proposed or result.proposed != depth:
                depth = result.proposed
                yield DraftRound(depth, result.proposed, result.accepted)
        session.engine.drafting.keep_learned(session.policy)
        return ended

    def _count(self, result) -> None:
        self.rounds += 1
        self.proposed += result.proposed
        self.accepted += result.accepted
        self.session.rows_run += 1 + result.proposed
        for j in range(result.proposed):
            if len(self.by_depth) <= j:
                self.by_depth.append([0, 0])
            # A guess is judged only where every guess before it stood.
            if j <= result.accepted:
                self.by_depth[j][0] += 1
                self.by_depth[j][1] += j < result.accepted

    def _done(self, finish: str, decode_s: float) -> Done:
        a, prompt, engine = self.answer, self.prompt, self.session.engine
        # A turn that was stopped in its prompt has read less than all of it.
        prefilled, emitted = min(self.session.target.n, len(prompt.ids)) - self.cached, len(a.ids)
        usage = {
            "prompt_tokens": len(prompt.ids),
            "cached_tokens": self.cached,
            "prefilled_tokens": prefilled,
            "thinking_tokens": a.thinking_tokens,
            "answer_tokens": emitted - a.thinking_tokens,
            "completion_tokens": emitted,
            "context_used": len(prompt.ids) + emitted,
            "context_limit": engine.context_limit,
        }
        timing = {
            "prefill_s": self.prefill_s,
            "first_token_s": self.first_token_s,
            "decode_s": decode_s,
            "prefill_tok_s": prefilled / max(self.prefill_s, 1e-9),
            "decode_tok_s": (emitted - self.first_tokens) / max(decode_s, 1e-9),
        }
        draft = {"mode": str(self.mode), "rounds": self.rounds, "proposed": self.proposed, "accepted": self.accepted, "by_depth": self.by_depth}
        after = engine.table_counters()
        residency = {name: after[name] - self.tables_before[name] for name in ("cold_rows", "warm_rows", "bytes_read")}
        return Done(finish, tuple(a.ids), a.reasoning_ids, a.body_ids, a.texts["thinking"], a.texts["answer"], usage, timing, draft, residency)

