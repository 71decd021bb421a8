"""Planted faults of drafted decode: each must turn a contract red. The numbers are those of spec drafting, section 8."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import rowcheck, sampling
from dsv41chat.engine.draft import dspark, host_pass
from dsv41chat.engine.draft.dspark import DSparkDrafter, DSparkModel
from dsv41chat.engine.draft.host_pass import HostPass
from dsv41chat.engine.draft.load import new_drafter
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.nn.hyper_connection import HyperConnection
from dsv41chat.engine.nn.indexer import Indexer
from dsv41chat.engine.nn.linear import Linear
from dsv41chat.engine.rows import Rows
from dsv41chat.engine.target import Target
from dsv41chat.engine.trunk_v41 import TrunkV41
from tests import drafting
from tests.drafting import PROMPT, Family, decode, settings
from tests.engine.draft import golden
from tests.engine.draft.test_goldens import check_dspark


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return Family("v41", tmp_path_factory.mktemp("pack"))


@pytest.fixture
def plain(family):
    return family.with_states("penalties", 0)


def guesses(text, vocab):
    """A drafter for runs that a fault may lead away from the text."""
    drafter = drafting.random_guesses(text, vocab)
    return SimpleNamespace(
        kind="scripted", block=5, window=16, needs_taps=True, ingest=drafter.ingest, rows=drafter.rows,
        propose=lambda pending, n, want, s: drafting.Proposal(tuple(drafter.guess(n + 1 + j, t) for j, t in enumerate(text[n + 1 : n + 1 + want]))),
    )  # fmt: skip


def tokens_differ(family, plain, make=guesses) -> bool:
    """Contract C1 is red: other tokens, or none at all."""
    run = decode(family.trunk, family.prompt(0), settings("penalties", 0), 26, make(plain.text, family.vocab), drafting.FixedDepth(5))
    return run.text != plain.text


def test_without_a_fault_nothing_differs(family, plain):
    assert not tokens_differ(family, plain)


def test_f1_ring_without_spare_rows(family, plain, monkeypatch):
    config = family.trunk.config
    small = type("Small", (type(config),), {"ring_rows": property(lambda self: 17), "roll_rows": property(lambda self: 8)})
    monkeypatch.setattr(family.trunk, "config", small(**config.__dict__))
    assert tokens_differ(family, plain)


def test_f2_one_lanes_length_is_not_reset_on_reject(family, plain, monkeypatch):
    """Entries are appended behind those of rejected rows instead of over them."""
    append = family.trunk.new_lane().append.__func__

    def planted(lane, name, first, rows):
        lane.lengths = getattr(lane, "lengths", {})
        first = max(first, lane.lengths.get(name, 0)) if name.startswith("pool.") else first
        lane.lengths[name] = first + rows.shape[0]
        append(lane, name, first, rows)

    monkeypatch.setattr("dsv41chat.engine.lane.Lane.append", planted)
    assert tokens_differ(family, plain)


def test_f3_entries_seen_by_what_is_emitted_instead_of_the_rows_position(family, plain, monkeypatch):
    monkeypatch.setattr(Rows, "length", lambda self, ratio: mx.full((self.n, 1), self.last_length(ratio), dtype=mx.int32))
    assert tokens_differ(family, plain)


def test_f4_history_of_the_hash_keeps_rejected_ids(family, plain, monkeypatch):
    seen: list[int] = []

    def planted(self, known, position, ids):
        history = (known[:position] if position < PROMPT else seen)[-self.hasher.lookback :]
        seen[:] = [*(known[:position] if position < PROMPT else seen), *(int(i) for i in ids)]
        return self.hasher.rows(history, ids)

    monkeypatch.setattr(TrunkV41, "_addresses", planted)
    monkeypatch.setattr(Target, "prefetch", lambda self, position, token: None)
    assert tokens_differ(family, plain)


def test_f5_the_drafter_ingests_rejected_rows(family, plain, monkeypatch):
    held, rows = [], Target.rows
    monkeypatch.setattr(Target, "rows", lambda self, *a, **k: held.append(rows(self, *a, **k)) or held[-1])
    scripted = drafting.random_guesses(plain.text, family.vocab)
    ingest = scripted.ingest
    scripted.ingest = lambda taps, first, tokens: ingest(held[-1].taps, first, [*tokens, *[0] * (held[-1].count - len(tokens))])
    with pytest.raises(AssertionError, match="committed rows and no others"):
        decode(family.trunk, family.prompt(0), settings("penalties", 0), 26, scripted, drafting.FixedDepth(5))


def test_f6_correction_from_the_row_before(family, plain, monkeypatch):
    rows = Target.rows

    def planted(self, *a, **k):
        trial = rows(self, *a, **k)
        if trial.logits is not None and trial.count > 1:
            trial.logits = mx.concatenate([trial.logits[:1], trial.logits[:-1]])
        return trial

    monkeypatch.setattr(Target, "rows", planted)
    assert tokens_differ(family, plain)


def test_f7_penalties_count_rejected_drafts(family, plain):
    def make(text, vocab):
        drafter, choose = guesses(text, vocab), drafting.choose
        propose, rejected = drafter.propose, []
        drafter.propose = lambda *a: (rejected.extend(p.ids), p)[1] if (p := propose(*a)) else p
        drafting.choose = lambda row, position, counts, params: choose(row, position, counts + drafting.Counter(rejected), params)
        return drafter

    exact = drafting.choose
    try:
        assert tokens_differ(family, plain, make)
    finally:
        drafting.choose = exact


def test_f8_noise_keyed_by_a_counter_of_rows(family, plain, monkeypatch):
    rows, used = Target.rows, [PROMPT]

    def planted(self, *a, **k):
        trial = rows(self, *a, **k)
        if trial.logits is not None:
            used[0] += trial.count
            trial.shift = used[0] - trial.count - (self.n + 1)
            current[0] = trial.shift
        return trial

    current, exact = [0], drafting.choose
    monkeypatch.setattr(Target, "rows", planted)
    monkeypatch.setattr(drafting, "choose", lambda row, position, counts, params: exact(row, position + current[0], counts, params))
    assert tokens_differ(family, plain)


def test_f9_the_budget_cuts_after_the_commit(family, monkeypatch):
    """The tokens are cut and the lane is not: its end is no longer where the answer ends."""
    commit = Target.commit
    monkeypatch.setattr(Target, "commit", lambda self, trial, keep: commit(self, trial, trial.count))
    prompt, text = family.prompt(0), family.plain("greedy", 0).text
    run = decode(
        family.trunk, prompt, settings("greedy"), 26, drafting.oracle(text, family.vocab), drafting.FixedDepth(5),
        cut=lambda ids: "stop" if len(ids) == 3 else None,
    )  # fmt: skip
    assert run.text == text[: PROMPT + 3] and run.target.n != PROMPT + 3 - 1


def test_f10_a_selection_is_used_again_in_the_next_round(family, plain, monkeypatch):
    score, last = Indexer.__call__, {}

    def planted(self, lane, rows, x, qr):
        score(self, lane, rows, x, qr)
        kept, last[self.layer.index] = last.get(self.layer.index), rows.picked
        if kept is not None and kept[0].shape == rows.picked[0].shape and rows.n > 1:
            rows.picked = kept

    monkeypatch.setattr(Indexer, "__call__", planted)
    assert tokens_differ(family, plain)


# drafter goldens ----------------------------------------------------------------------------------------------------------


def goldens_fail(host: bool = False) -> bool:
    """Whether test T9 is red."""
    model = dataclasses.replace(golden.model("v41_dspark", True), host=host)
    try:
        check_dspark(DSparkDrafter(model), golden.arrays("v41_dspark_io"), "")
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("host", [False, True], ids=["mlx", "host"])
def test_without_a_fault_the_goldens_hold(host):
    assert not goldens_fail(host)


def test_f11_a_causal_block(monkeypatch):
    attend = Stage.attend

    def planted(self, x, keys, keep_mask, table):
        n, k = x.shape[0], keys.shape[1]
        own = mx.arange(k)[None] <= k - n + mx.arange(n)[:, None]
        return attend(self, x, keys, keep_mask & own, table)

    monkeypatch.setattr(Stage, "attend", planted)
    assert goldens_fail()


def test_f12_a_stage_collapses_with_its_own_mix(monkeypatch):
    newest, mix, collapse = [], HyperConnection.__call__, dspark.collapse
    monkeypatch.setattr(HyperConnection, "__call__", lambda self, h: newest.append(mix(self, h)) or newest[-1])
    monkeypatch.setattr(dspark, "collapse", lambda h, pre: collapse(h, newest[-1][0]))
    assert goldens_fail()


def test_f13_markov_bias_of_the_anchor_for_every_row(monkeypatch):
    propose = DSparkModel.propose

    def planted(self, *a, **k):
        table, self.markov_embed = self.markov_embed, FirstRow(self.markov_embed)
        try:
            return propose(self, *a, **k)
        finally:
            self.markov_embed = table

    monkeypatch.setattr(DSparkModel, "propose", planted)
    assert goldens_fail()


def test_f14_confidence_from_the_normed_hidden(monkeypatch):
    """Logits stay as they are: the last norm of a normed row is the same row."""
    forward = DSparkModel.forward
    monkeypatch.setattr(DSparkModel, "forward", lambda self, *a: dspark.rms(forward(self, *a), None, self.eps))
    assert goldens_fail()


def test_f15_positions_off_by_one(monkeypatch):
    table = dspark.rope_table
    monkeypatch.setattr(dspark, "rope_table", lambda f, at: table(f, at - 1 if len(at) == 5 else at))
    assert goldens_fail()


class FirstRow:
    """A table that gives the row of the first token it was asked for, whatever is asked."""

    def __init__(self, table):
        self.table, self.first = table, None

    def __getitem__(self, token):
        self.first = token if self.first is None else self.first
        return self.table[self.first]


def causal(monkeypatch):
    exact = host_pass.attend

    def planted(stage, x, keys, keep, sink, table):
        n, k = len(x), keys.shape[1]
        return exact(stage, x, keys, keep & (np.arange(k)[None] <= k - n + np.arange(n)[:, None]), sink, table)

    monkeypatch.setattr(host_pass, "attend", planted)


def own_mix(monkeypatch):
    exact, collapse, newest = host_pass.call, host_pass.collapse, []
    keep = lambda found: newest.append(found[0]) or found if isinstance(found, tuple) and len(found) == 3 else found
    monkeypatch.setattr(host_pass, "call", lambda operation, *args: keep(exact(operation, *args)))
    monkeypatch.setattr(host_pass, "collapse", lambda h, pre: collapse(h, newest[-1]))


def one_bias(monkeypatch):
    exact = HostPass.propose

    def planted(self, *a):
        table, self.markov = self.markov, FirstRow(self.markov)
        try:
            return exact(self, *a)
        finally:
            self.markov = table

    monkeypatch.setattr(HostPass, "propose", planted)


def normed_confidence(monkeypatch):
    exact = HostPass.forward
    monkeypatch.setattr(HostPass, "forward", lambda self, *a: host_pass.norm(exact(self, *a), None, self.model.eps))


def one_off(monkeypatch):
    exact = host_pass.host_table
    monkeypatch.setattr(host_pass, "host_table", lambda f, at: exact(f, at - 1 if len(at) == 5 else at))


@pytest.mark.parametrize("plant", [causal, own_mix, one_bias, normed_confidence, one_off])
def test_f11_to_f15_in_the_host_pass(monkeypatch, plant):
    plant(monkeypatch)
    assert goldens_fail(host=True) and not goldens_fail()


def test_f16_ties_go_to_the_last_id(monkeypatch):
    row = np.array([0.0, 3.0, 1.0, 3.0], np.float32)
    greedy = sampling.SamplingParams()
    assert sampling.choose(row, 0, {}, greedy) == 1

    class LastOfTies:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def argmax(z):
            return len(z) - 1 - np.argmax(z[::-1])

    monkeypatch.setattr(sampling, "np", LastOfTies())
    assert sampling.choose(row, 0, {}, greedy) != 1


@dataclasses.dataclass
class WidthDependent(Linear):
    """A kernel whose rows depend on how many there are, as tiled ones do."""

    def __call__(self, x):
        return super().__call__(x) * (1 + (x.shape[0] > 1) * (x.shape[0] < 9))


def test_f17_batched_where_the_probe_says_row_by_row(family, plain):
    layer = family.trunk.layers[2].attention.weights
    exact, layer.wq_b = layer.wq_b, WidthDependent(layer.wq_b.weight)
    try:
        changed = family.plain.__wrapped__("penalties", 0)
        verdicts = rowcheck.probe(family.trunk, 6)
        assert [v.tokenwise for v in verdicts if v.op.startswith("WidthDependent")] == [(2, 3, 4, 5, 6)]
        assert tokens_differ(family, changed), "exact = fast: batched everywhere"
        assert rowcheck.install(family.trunk, verdicts) == 1
        assert not tokens_differ(family, changed)
        assert isinstance(layer.wq_b, rowcheck.Tokenwise) and "row by row for windows of 2, 3" in str(max(verdicts, key=lambda v: len(v.tokenwise)))
        assert rowcheck.install(family.trunk, []) == 0 and isinstance(layer.wq_b, WidthDependent)
    finally:
        layer.wq_b = exact


def test_t10_taps_from_the_other_side_of_the_layer(tmp_path):
    """V4.1 taps the streams that enter a layer. Tapping what leaves it changes what is proposed and kept."""
    family = Family("v41", tmp_path)
    own = drafting.write_with_drafter(drafting.DATA / "v41", tmp_path / "own", "dspark", None)
    trunk, model = drafting.load(own)
    right, entering = [], trunk.tap_layers
    for taps in (entering, tuple(t - 1 for t in entering)):
        trunk.tap_layers = taps
        run = decode(trunk, family.prompt(0), settings("greedy"), 20, new_drafter(model), drafting.FixedDepth(0))
        right.append(run.drafter.propose(run.text[run.target.n], run.target.n, 5, settings("greedy")).confidence)
    assert right[0] != right[1]
