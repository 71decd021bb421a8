"""What windows of rows and a pass of the drafter cost: guessed by shape, then measured while answers are made.

A guess holds until something is timed: the first plain steps turn it into seconds, and each window size that is timed corrects the
guesses for those that are not. The first samples count by their median, later ones by a moving mean that damps pauses of the machine.
Source: spec drafting, sections 6.2 and 6.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import median_low

STEP_COST, FIRST_COSTS = 0.15, 3
SHARED_DRIFT = 0.5
# A size that was timed this often counts half by its own times, half by what the other sizes suggest.
PULL = 3
# A time this many times the expected one is a pause of the machine rather than news about it.
SPIKE = 2.0
# The very first sample of a size, which may compile or page something in, is believed up to this many times its guess.
FIRST_CAP = 4.0
# Drafted rounds after which a plain step is due to be timed again; sooner while few have been.
STALE_ROUNDS, STALE_AT_FIRST, FEW = 128, 24, 5
# Plain steps timed before anything is drafted in a process: without the cost of one row there is no loss to account for.
_FIRST_PLAIN = 2


def prior_costs(block: int, experts: int, picks: int, layers: float = 0.07, host: bool = False) -> tuple[list[float], float]:
    """(cost of a window of 1 .. block + 1 rows, cost of a pass of the drafter), in plain steps, before anything is measured.

    Half of a step is fixed, 15 % grows with the rows, the rest with the distinct experts that the rows touch. host: operations are calls
    of an optimised CPU library, for which more is fixed. layers: those that a pass runs, as a share of the trunk's; a pass costs what
    they cost, for as many rows as a middling window, and something for the head.
    """
    distinct = lambda m: experts * (1 - (1 - picks / experts) ** m) / picks
    fixed, row, expert = (0.8, 0.1, 0.1) if host else (0.5, 0.15, 0.35)
    rows = [fixed + row * m + expert * distinct(m) for m in range(1, block + 2)]
    return rows, 0.05 + layers * rows[block // 2]


class DraftCosts:
    """Seconds: `rows[m - 1]` of a verify of m rows, `draft` of a pass of the drafter. One table per engine.

    Until one row has been timed the figures are in plain steps; the first timing turns them into seconds.
    """

    def __init__(self, rows: Sequence[float], draft: float, samples: Sequence[int] | None = None, draft_samples: int = 0):
        self.set(rows, draft, samples if samples is not None else [0] * len(rows), draft_samples)

    def set(self, rows: Sequence[float], draft: float, samples: Sequence[int], draft_samples: int) -> None:
        """Start from these figures, each of so many samples."""
        self.rows, self.draft, self.samples, self.draft_samples = list(rows), draft, list(samples), draft_samples
        self._since_plain = 0
        # What was timed, apart from what `rows` makes of it; and by how much further rows were more than the first in the beginning.
        self._timed = list(rows)
        self._shape = [max(c / self.rows[0] - 1, 0.01) for c in self.rows]
        self._first = [[c] * min(s, FIRST_COSTS) for c, s in zip(self.rows, self.samples)]
        self._first_draft = [draft] * min(draft_samples, FIRST_COSTS)

    @property
    def known(self) -> bool:
        """Whether the figures are seconds of this machine."""
        return self.samples[0] >= _FIRST_PLAIN

    @property
    def stale(self) -> bool:
        """Whether a plain step should be timed, which everything is weighed against."""
        return self._since_plain >= (STALE_AT_FIRST if self.samples[0] < FEW else STALE_ROUNDS)

    @property
    def windows_known(self) -> bool:
        """Whether a window of several rows has been timed more than once: a first time may compile or page something in."""
        return max(self.samples[1:], default=FIRST_COSTS) > 1

    def observe(self, m: int, seconds: float) -> None:
        """A verify of m rows took so long."""
        i, timed, samples = m - 1, self._timed, self.samples
        if i == 0 and samples[0] < _FIRST_PLAIN:
            # The first step of a process pays for warming up, so the shorter of the first ones counts.
            unit = seconds if samples[0] == 0 else min(1.0, seconds / timed[0])
            self._timed = [c * unit if not s or j == 0 else c for j, (c, s) in enumerate(zip(timed, samples))]
            self.draft *= unit if not self.draft_samples else 1.0
            self._first[0].append(self._timed[0])
        else:
            moved = _moved(timed[i] if samples[i] else self.rows[i], seconds, samples[i], self._first[i])
            # What changes a known cost (a longer context, a busy machine) changes the others too, which may not be seen for long.
            shared = 1 + SHARED_DRIFT * (moved / timed[i] - 1) if samples[i] >= FIRST_COSTS else 1.0
            self._timed = [moved if j == i else c * shared for j, c in enumerate(timed)]
        samples[i] += 1
        self._since_plain = self._since_plain + 1 if i else 0
        self._draw()

    def _draw(self) -> None:
        """The figures to go by: the guessed shape, stretched to what was timed, and each size its own as it is timed more often."""
        one, weight = self._timed[0], [0, *self.samples[1:]]
        total = sum(weight)
        stretch = sum(w * (c / one - 1) / s for w, c, s in zip(weight, self._timed, self._shape)) / total if total else 1.0
        line = [one * (1 + stretch * s) for s in self._shape]
        self.rows = [one] + [(n * c + PULL * guess) / (n + PULL) for n, c, guess in zip(self.samples[1:], self._timed[1:], line[1:])]

    def observe_draft(self, seconds: float, backlog: bool = False) -> None:
        """A pass took so long. backlog: it also took in more rows than one round leaves, so the time only says what is enough."""
        if backlog and seconds >= self.draft:
            return
        self.draft = _moved(self.draft, seconds, self.draft_samples, self._first_draft)
        self.draft_samples += 1

    def to_json(self) -> str:
        return json.dumps({"rows": self.rows, "draft": self.draft, "samples": self.samples, "draft_samples": self.draft_samples})

    @classmethod
    def from_json(cls, text: str, block: int) -> DraftCosts | None:
        """None for a text that is no cost table of this block size."""
        try:
            raw = json.loads(text)
            rows, samples = [float(v) for v in raw["rows"]], [int(v) for v in raw["samples"]]
            draft, draft_samples = float(raw["draft"]), int(raw["draft_samples"])
        except (ValueError, TypeError, KeyError):
            return None
        good = len(rows) == len(samples) == block + 1 and all(0 < v < math.inf for v in (*rows, draft))
        return cls(rows, draft, samples, draft_samples) if good else None


def _moved(old: float, new: float, samples: int, first: list[float]) -> float:
    """The next estimate; `first` keeps the first samples."""
    if samples < FIRST_COSTS:
        first.append(min(new, FIRST_CAP * old) if not first else new)
        return median_low(first)
    step = STEP_COST
    if new > SPIKE * old:
        # A spike (another program, a kernel compiled on first use) says little about the next round.
        step, new = step / 4, min(new, 4 * old)
    return old + step * (new - old)
