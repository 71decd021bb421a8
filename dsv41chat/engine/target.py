"""`Target`: a trunk and a lane. Rows are tried, looked at, and committed up to the one that counts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dsv41chat.engine.lane import Lane
from dsv41chat.engine.trial import Trial, Trunk


class Target:
    """trial = target.rows(ids); target.commit(trial, keep). Nothing counts until commit; a trial that is not committed never happened."""

    def __init__(self, trunk: Trunk, lane: Lane | None = None):
        self.trunk = trunk
        self.lane = lane or trunk.new_lane()
        self._open: Trial | None = None

    @property
    def n(self) -> int:
        return self.lane.n

    @property
    def recorded(self) -> int:
        """How many steps and passes of the drafter have been recorded for this trunk: a call that records one takes many times its time."""
        routes = self.trunk.routes
        return sum(replay.recorded for replay in (routes.replay, routes.draft_replay) if replay is not None)

    def rows(self, ids: Sequence[int], logits_from: int | None = 0, want_taps: bool = False, ahead: Sequence[int] = ()) -> Trial:
        """Forward of len(ids) >= 1 rows at positions n, n + 1, ...; drops an open trial. ahead: ids that will follow, for read-ahead, and few
        of them so that a recorded step that comes next finds all ready.

        More than `roll` rows overwrite what a rollback would need: such a trial can only be committed whole. When building the
        forward fails (a table row cannot be read), the lane is as it was before the call; when the device fails while computing,
        its buffers are lost and the lane starts again from nothing.
        """
        lane = self.lane
        self._drop_open()
        if not len(ids):
            raise ValueError("a forward needs at least one row")
        high, long = lane.high, len(ids) > lane.roll
        held = lane.hold_rings() if long else None
        lane.high = max(high, lane.n + len(ids))
        lane.ids[lane.n :] = [int(i) for i in ids]
        try:
            trial = self.trunk.forward(lane, lane.ids[lane.n :], lane.n, logits_from, want_taps, ahead)
        except BaseException:
            if held is not None:
                lane.restore_rings(held)
                lane.high = high
            del lane.ids[lane.n :]
            raise
        try:
            if not trial.done:
                self._compute(trial, want_taps, len(ahead))
        except BaseException:
            lane.reset(lost=True)
            raise
        self._open = trial
        return trial

    def _compute(self, trial: Trial, taps: bool, ahead: int) -> None:
        replay, lane = self.trunk.routes.replay, self.lane
        if replay is not None and ahead and replay.takes(ahead, 0):
            replay.compute(trial.arrays(), lane, trial.start + trial.count, ahead, taps)
        else:
            mx.eval(trial.arrays(), lane.arrays())

    def prefetch(self, position: int, token: int) -> None:
        """`token` was chosen for `position`, after rows of the open trial: its table rows can be on their way already."""
        self.trunk.prefetch(self.lane.ids, position, [token])

    def commit(self, trial: Trial, keep: int) -> None:
        """The first `keep` rows of the open trial count, the others never happened."""
        if trial is not self._open or not 0 <= keep <= trial.count:
            raise ValueError(f"cannot keep {keep} rows of {'another trial' if trial is not self._open else trial.count}")
        if trial.count > self.lane.roll and keep != trial.count:
            raise ValueError(f"a chunk of {trial.count} rows is longer than the ring's {self.lane.roll} and must be committed whole")
        self._open = None
        self.lane.n += keep
        del self.lane.ids[self.lane.n :]

    def drop(self) -> None:
        """Forget an open trial of at most `roll` rows."""
        self._drop_open()

    def _drop_open(self) -> None:
        if self._open is not None:
            if self._open.count > self.lane.roll:
                raise ValueError("an open chunk longer than the ring must be committed before anything else runs")
            self._open = None
            del self.lane.ids[self.lane.n :]
