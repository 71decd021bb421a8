"""How many proposals a round verifies: fixed, or adaptive with a bounded loss against plain decode.

The adaptive policy picks a depth by optimal stopping from calibrated confidences and measured costs. It keeps a loss account in
seconds against plain decode; when the account passes 1.5 % of the decode time plus a small grant it parks: rounds are plain, and
now and then the drafter alone runs and its proposals are compared with what plain decode emits anyway. Nothing here touches
tokens. Source: spec drafting, section 6.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv41chat.engine.draft.base import Proposal

STEP_DRAFT, STEP_SHADOW, STEP_RATE = 0.10, 0.20, 0.12
STEP_COST, STEP_FIRST_COSTS, FIRST_COSTS = 0.15, 0.4, 3
SHARED_DRIFT = 0.5
# A time this many times the expected one is a pause of the machine rather than news about it.
SPIKE = 2.0
BUDGET, GRANT, CREDIT = 0.015, 1.0, 4.0
ON, OFF = 1.06, 0.99
STALE_ROUNDS = 128
DECAY, PRIOR = 0.97, 2.0
LONGEST_ROUND_S = 5.0
# Plain steps timed before anything is drafted in a process: without the cost of one row there is no loss to account for.
_FIRST_PLAIN = 2


@dataclass(frozen=True)
class RoundTimes:
    """draft_s: drafter; verify_s: the forward and its host sync; total_s: the whole round, walk and bookkeeping included."""

    draft_s: float
    verify_s: float
    total_s: float


class FixedDepth:
    """Always `depth` proposals; 0 is plain decode."""

    def __init__(self, depth: int):
        self.depth = depth

    def ask(self, limit: int) -> int:
        return min(self.depth, limit)

    def keep(self, proposal: Proposal, limit: int) -> int:
        return min(len(proposal.ids), limit)

    def learn(self, proposal: Proposal, kept: int, emitted: Sequence[int], times: RoundTimes) -> None:
        return


def prior_costs(block: int, experts: int, picks: int) -> tuple[list[float], float]:
    """(cost of a window of 1 .. block + 1 rows, cost of a pass of the drafter), in plain steps, before anything is measured.

    Half of a step is fixed, 15 % grows with the rows, the rest with the distinct experts that the rows touch.
    """
    distinct = lambda m: experts * (1 - (1 - picks / experts) ** m) / picks
    return [0.5 + 0.15 * m + 0.35 * distinct(m) for m in range(1, block + 2)], 0.15


class DraftCosts:
    """Seconds: `rows[m - 1]` of a verify of m rows, `draft` of a pass of the drafter. One table per engine.

    Until one row has been timed the figures are in plain steps; the first timing turns them into seconds.
    """

    def __init__(self, rows: Sequence[float], draft: float, samples: Sequence[int] | None = None):
        self.rows, self.draft = list(rows), draft
        self.samples = list(samples) if samples is not None else [0] * len(self.rows)
        self.draft_samples = 0

    @property
    def known(self) -> bool:
        """Whether the figures are seconds of this machine."""
        return self.samples[0] >= _FIRST_PLAIN

    def observe(self, m: int, seconds: float) -> None:
        i = m - 1
        if i == 0 and self.samples[0] < _FIRST_PLAIN:
            # The first step of a process pays for warming up, so the shorter of the first ones counts.
            unit = seconds if self.samples[0] == 0 else min(1.0, seconds / self.rows[0])
            self.rows = [c * unit if not s or j == 0 else c for j, (c, s) in enumerate(zip(self.rows, self.samples))]
            self.draft *= unit if not self.draft_samples else 1.0
        else:
            moved = self._moved(self.rows[i], seconds, self.samples[i])
            # What changes a known cost (a longer context, a busy machine) changes the others too, which may not be seen for long.
            shared = 1 + SHARED_DRIFT * (moved / self.rows[i] - 1) if self.samples[i] >= FIRST_COSTS else 1.0
            self.rows = [moved if j == i else c * shared for j, c in enumerate(self.rows)]
        self.samples[i] += 1

    def observe_draft(self, seconds: float) -> None:
        self.draft = self._moved(self.draft, seconds, self.draft_samples)
        self.draft_samples += 1

    @staticmethod
    def _moved(old: float, new: float, samples: int) -> float:
        step = STEP_FIRST_COSTS if samples < FIRST_COSTS else STEP_COST
        if new > SPIKE * old:
            # A spike (another program, a kernel compiled on first use) says little about the next round.
            step, new = step / 4, min(new, 4 * old)
        return old + step * (new - old)

    def to_json(self) -> str:
        return json.dumps({"rows": self.rows, "draft": self.draft, "samples": self.samples})

    @classmethod
    def from_json(cls, text: str, block: int) -> DraftCosts | None:
        """None for a text that is no cost table of this block size."""
        try:
            raw = json.loads(text)
            rows, samples = [float(v) for v in raw["rows"]], [int(v) for v in raw["samples"]]
            draft = float(raw["draft"])
        except (ValueError, TypeError, KeyError):
            return None
        good = len(rows) == len(samples) == block + 1 and all(0 < v < math.inf for v in (*rows, draft))
        return cls(rows, draft, samples) if good else None


class DepthPolicy:
    """One conversation's adaptive depth. acceptance[j]: chance that proposal j + 1 stands given that those before it stood.

    ask -> propose -> keep -> verify -> learn, once per round. A proposal is asked for either to be verified or as a shadow.
    """

    def __init__(self, block: int, costs: DraftCosts):
        self.block, self.costs = block, costs
        self.acceptance = [0.75 * 0.93**j for j in range(block)]
        self.kept, self.chance = [0.0] * block, [0.0] * block
        self.begin_turn()

    def fork(self) -> DepthPolicy:
        """The start of another conversation: what was learned here counts half."""
        other = DepthPolicy(self.block, self.costs)
        other.acceptance = [(a + b) / 2 for a, b in zip(self.acceptance, other.acceptance)]
        other.kept, other.chance = [v / 2 for v in self.kept], [v / 2 for v in self.chance]
        other.begin_turn()
        return other

    def begin_turn(self) -> None:
        """A new answer: the loss account starts again, what was learned about the text and the machine stays."""
        self.loss = self.total = 0.0
        self.rate: float | None = None
        self.since_plain = 0
        # A shadow's guesses that are still to be compared, and the proposal and index that the next of them has.
        self.shadow: list[int] | None = None
        self.guessed: tuple[Proposal, int] = (Proposal(()), 0)
        self.parked = self.gain() < ON
        self.mode = "plain"

    def gain(self) -> float:
        """Best expected speed over plain decode at any depth."""
        c, expected, weight, best = self.costs, 1.0, 1.0, 1.0 / (1.0 + self.costs.draft / self.costs.rows[0])
        for k in range(1, self.block + 1):
            weight *= self.acceptance[k - 1]
            expected += weight
            best = max(best, expected * c.rows[0] / (c.rows[k] + c.draft))
        return best

    def ask(self, limit: int) -> int:
        """Proposals to ask the drafter for; 0 for a plain round."""
        self.mode = self._mode() if limit > 0 else "plain"
        return 0 if self.mode == "plain" else self.block if self.mode == "shadow" else min(self.block, limit)

    def _mode(self) -> str:
        one = self.costs.rows[0]
        if not self.costs.known:
            return "plain"
        if not self.parked and self.loss > BUDGET * self.total + GRANT * one:
            self.parked = True
        if not self.parked:
            return "plain" if self.since_plain >= STALE_ROUNDS else "draft"
        if not self.shadow and self.loss + self.costs.draft <= BUDGET * self.total + 0.5 * GRANT * one:
            return "shadow"
        return "plain"

    def keep(self, proposal: Proposal, limit: int) -> int:
        """How many of the proposals to verify; 0 makes the round plain although the drafter has run."""
        if self.mode != "draft":
            return 0
        rows, best, best_value = self.costs.rows, 0, None
        rate = max(self.rate or 0.0, 1 / rows[0])
        expected = weight = 1.0
        for k in range(0, min(len(proposal.ids), limit) + 1):
            if k:
                weight *= self._chance(k - 1, proposal.confidence)
                expected += weight
            value = expected - rate * rows[k]
            if best_value is None or value > best_value:
                best, best_value = k, value
        return best

    def _chance(self, j: int, confidence: Sequence[float] | None) -> float:
        """Chance that proposal j + 1 stands given that those before it do."""
        if confidence is None:
            return self.acceptance[j]
        correction = (self.kept[j] + PRIOR) / (self.chance[j] + PRIOR)
        return min(0.995, _sigmoid(confidence[j]) * min(max(correction, 0.2), 3.0))

    def learn(self, proposal: Proposal, kept: int, emitted: Sequence[int], times: RoundTimes) -> None:
        """The round is over: `kept` proposals were verified and `emitted` came out, one more than stood."""
        timed = times.total_s <= max(LONGEST_ROUND_S, 4 * self.costs.rows[0])
        if proposal.ids and timed:
            self.costs.observe_draft(times.draft_s)
        if self.mode == "draft" and proposal.ids:
            self._learn_drafted(proposal, kept, emitted, times, timed)
            return
        seconds = times.total_s - times.draft_s
        if self.mode == "shadow" and proposal.ids:
            self.shadow, self.guessed = list(proposal.ids), (proposal, 0)
            if timed:
                self.loss += times.draft_s
                self.total += times.draft_s
        if timed:
            self.costs.observe(1, seconds)
            self.total += seconds
        self.since_plain = 0
        self._feed_shadow(emitted[0])

    def _learn_drafted(self, proposal: Proposal, kept: int, emitted: Sequence[int], times: RoundTimes, timed: bool) -> None:
        accepted = len(emitted) - 1
        # Proposals after the first reject carry no information. Those that were not verified would teach the chance of bad moments
        # only: the depth was cut because they looked weak, while `gain` asks what a depth earns where it is used.
        for j in range(min(kept, accepted + 1)):
            self._judge(j, proposal.ids[j] == emitted[j], STEP_DRAFT, proposal.confidence)
        self.since_plain = self.since_plain + 1 if kept else 0
        if timed:
            self.costs.observe(kept + 1, times.verify_s)
            one, modelled = self.costs.rows[0], self.costs.rows[kept] + self.costs.draft
            # A pause that is not the round's own doing is not charged to drafting.
            seconds = min(times.total_s, SPIKE * modelled)
            self.total += seconds
            self.loss = max(self.loss + seconds - len(emitted) * one, -CREDIT * one)
            # By the cost table, not by this round's clock: chances and costs of one depth are weighed against those of others, and a
            # round that was fast by luck would make every depth look too dear.
            speed = len(emitted) / modelled
            self.rate = speed if self.rate is None else self.rate + STEP_RATE * (speed - self.rate)
        if self.gain() < OFF:
            self.parked = True

    def _feed_shadow(self, token: int) -> None:
        """Compare the next emitted token with the shadow's next guess; at its first miss or its end the shadow has told its part."""
        if not self.shadow:
            return
        proposal, j = self.guessed
        hit = self.shadow.pop(0) == token
        self._judge(j, hit, STEP_SHADOW, proposal.confidence)
        self.guessed = (proposal, j + 1)
        if not hit:
            self.shadow = None
        if not self.shadow and self.gain() >= ON:
            self.shadow, self.parked, self.rate = None, False, None

    def _judge(self, j: int, hit: bool, step: float, confidence: Sequence[float] | None) -> None:
        self.acceptance[j] += step * (hit - self.acceptance[j])
        if confidence is not None:
            self.kept[j] = DECAY * self.kept[j] + hit
            self.chance[j] = DECAY * self.chance[j] + _sigmoid(confidence[j])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
