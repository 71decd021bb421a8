"""How many proposals a round verifies: fixed, or adaptive with a bounded loss against plain decode.

The adaptive policy picks a depth by optimal stopping from calibrated confidences and measured costs. It keeps a loss account in
seconds against plain decode and never stakes more on a round than 1.5 % of the decode time and a small grant leave. Where the chances
learned so far promise no gain it parks: rounds are plain, and now and then the drafter alone runs. Its proposals are compared with what
plain decode emits anyway, or verified at once where the drafter is sure of them. Nothing here touches tokens.
Source: spec drafting, section 6.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv41chat.engine.draft.base import Proposal
from dsv41chat.engine.draft.costs import DraftCosts

STEP_DRAFT, STEP_SHADOW, STEP_RATE = 0.10, 0.20, 0.12
# A share of the decode time, and plain steps. BUDGET and GRANT: what a turn may lose, and BONUS more while the newest guesses, or earlier
# answers, promise a lot, so that one bad round at its start does not end drafting; LOOK: the part that a pass while parked may take;
# FIRST_LOOK: the dearest pass that a turn without a loss may try; CREDIT: what is remembered of a gain.
BUDGET, GRANT, BONUS, LOOK, FIRST_LOOK, CREDIT = 0.015, 1.0, 1.0, 0.5, 1.25, 4.0
# Expected speeds over plain decode: to draft again by what was learned, to go on drafting, good prospects, and to believe the drafter alone.
ON, OFF, GOOD, SURE = 1.06, 0.99, 1.15, 1.65
# A round is charged at most this many times what it should have taken.
LATE = 1.25
DECAY, PRIOR = 0.97, 2.0
LONGEST_ROUND_S = 5.0


@dataclass(frozen=True)
class RoundTimes:
    """draft_s: drafter; verify_s: the forward and its host sync; total_s: the whole round, walk and bookkeeping included. first: whether
    something in it was recorded for the first time, which tells nothing of what rounds cost."""

    draft_s: float
    verify_s: float
    total_s: float
    first: bool = False


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


class DepthPolicy:
    """One conversation's adaptive depth. acceptance[j]: chance that proposal j + 1 stands given that those before it stood.
    judged: proposals that it has learned from. taught: earlier answers have been learned from, here or in what it began with.

    ask -> propose -> keep -> verify -> learn, once per round. A proposal is asked for either to be verified or as a shadow.
    """

    def __init__(self, block: int, costs: DraftCosts):
        self.block, self.costs = block, costs
        self.acceptance = [0.75 * 0.93**j for j in range(block)]
        self.kept, self.chance = [0.0] * block, [0.0] * block
        self.judged, self.taught = 0, False
        self.begin_turn()

    def fork(self) -> DepthPolicy:
        """The start of another conversation: what was learned here counts half."""
        other = DepthPolicy(self.block, self.costs)
        other.acceptance = [(a + b) / 2 for a, b in zip(self.acceptance, other.acceptance)]
        other.kept, other.chance = [v / 2 for v in self.kept], [v / 2 for v in self.chance]
        other.taught = self.taught or self.judged > 0
        other.begin_turn()
        return other

    def to_json(self) -> str:
        """What was learned about texts; nothing about the machine."""
        return json.dumps({"acceptance": self.acceptance, "kept": self.kept, "chance": self.chance})

    def recall(self, text: str) -> None:
        """Inverse of `to_json`; a text that is none of this block size changes nothing."""
        try:
            raw = json.loads(text)
            found = [[float(v) for v in raw[name]] for name in ("acceptance", "kept", "chance")]
        except (ValueError, TypeError, KeyError):
            return
        most = (1.0, math.inf, math.inf)
        if all(len(values) == self.block and all(0 <= v <= top and v < math.inf for v in values) for values, top in zip(found, most)):
            self.acceptance, self.kept, self.chance = found
            self.taught = True
            self.begin_turn()

    def begin_turn(self) -> None:
        """A new answer: the loss account starts again, what was learned about the text and the machine stays."""
        self.loss = self.total = 0.0
        self.rate: float | None = None
        # Rows that came since the drafter last ran; the prompt's are many.
        self.waiting: float = math.inf
        # A shadow's guesses that are still to be compared, and the proposal and index that the next of them has.
        self.shadow: list[int] | None = None
        self.guessed: tuple[Proposal, int] = (Proposal(()), 0)
        prospects, self.taught = self.gain(), self.taught or self.judged > 0
        # Expected speed over plain decode: of the newest guesses, before the first ones by what earlier answers taught.
        self.parked, self.promise = prospects < ON, prospects if self.taught else 0.0
        self.mode = "plain"

    def gain(self) -> float:
        """Best expected speed over plain decode at any depth."""
        return self._speed(self.acceptance)

    def _speed(self, chances: Sequence[float]) -> float:
        """Best expected speed over plain decode, a pass of the drafter included, at any depth up to len(chances)."""
        c, expected, weight, best = self.costs, 1.0, 1.0, 1.0 / (1.0 + self.costs.draft / self.costs.rows[0])
        for k, chance in enumerate(chances, 1):
            weight *= chance
            expected += weight
            best = max(best, expected * c.rows[0] / (c.rows[k] + c.draft))
        return best

    def ask(self, limit: int) -> int:
        """Proposals to ask the drafter for; 0 for a plain round."""
        self.mode = self._mode() if limit > 0 else "plain"
        # Always a whole block, also where fewer can count: passes of other sizes would be compiled or recorded for an answer's last round.
        return 0 if self.mode == "plain" else self.block

    def _mode(self) -> str:
        one, earned = self.costs.rows[0], BUDGET * self.total
        if not self.costs.known:
            return "plain"
        if not self.parked and self.loss > earned + (GRANT + BONUS * (self.promise >= GOOD)) * one:
            self.parked = True
        if not self.parked:
            return "plain" if self.costs.stale else "draft"
        look = LOOK * one if self.loss > earned else max(LOOK * one, min(self.costs.draft, FIRST_LOOK * one))
        return "shadow" if not self.shadow and self.loss + self.costs.draft <= earned + look else "plain"

    def keep(self, proposal: Proposal, limit: int) -> int:
        """How many of the proposals to verify; 0 makes the round plain although the drafter has run."""
        most = min(len(proposal.ids), limit)
        chances = [self._chance(j, proposal.confidence) for j in range(most)]
        # Guessed costs that are too high would never be found out, so the first windows of a machine are verified whatever they promise.
        untimed = self.mode != "plain" and most > 0 and not self.costs.windows_known
        if most:
            self.promise = self._speed(chances)
        sure = proposal.confidence is not None and self.promise >= SURE
        if self.mode == "shadow" and (untimed or sure):
            # The drafter is sure enough for its guesses to be tried at once.
            self.mode, self.parked, self.rate, self.shadow = "draft", False, None, None
        if self.mode != "draft" or untimed:
            return most if untimed else 0
        rows, best, best_value = self.costs.rows, 0, None
        rate = max(self.rate or 0.0, 1 / rows[0])
        expected = weight = 1.0
        for k in range(0, most + 1):
            if k:
                weight *= chances[k - 1]
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
        timed = not times.first and times.total_s <= max(LONGEST_ROUND_S, 4 * self.costs.rows[0])
        if proposal.ids:
            if timed:
                self.costs.observe_draft(times.draft_s, backlog=self.waiting > self.block + 1)
            self.waiting = 0
        self.waiting += len(emitted)
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
        self._feed_shadow(emitted[0])

    def _learn_drafted(self, proposal: Proposal, kept: int, emitted: Sequence[int], times: RoundTimes, timed: bool) -> None:
        accepted = len(emitted) - 1
        # Proposals after the first reject carry no information. Those that were not verified would teach the chance of bad moments
        # only: the depth was cut because they looked weak, while `gain` asks what a depth earns where it is used.
        for j in range(min(kept, accepted + 1)):
            self._judge(j, proposal.ids[j] == emitted[j], STEP_DRAFT, proposal.confidence)
        if timed:
            self.costs.observe(kept + 1, times.verify_s)
            one, modelled = self.costs.rows[0], self.costs.rows[kept] + self.costs.draft
            # A pause that is not the round's own doing is not charged to drafting; if rounds do take longer, the costs soon say so.
            seconds = min(times.total_s, LATE * modelled)
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
        self.judged += 1
        self.acceptance[j] += step * (hit - self.acceptance[j])
        if confidence is not None:
            self.kept[j] = DECAY * self.kept[j] + hit
            self.chance[j] = DECAY * self.chance[j] + _sigmoid(confidence[j])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
