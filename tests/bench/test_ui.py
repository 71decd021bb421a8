"""The measurement of the full screen runs and tells drawn from sent; its times are not judged here."""

from __future__ import annotations

import json

from dsv41chat.bench.ui import percentiles, run


def test_a_short_run_writes_a_receipt(tmp_path):
    out = tmp_path / "ui.json"
    assert run(messages=60, search_messages=200, seconds=1.0, rate=60.0, contents=["table"], output=out) == 0
    found = json.loads(out.read_text())
    row = found["contents"]["table"]
    assert row["sent_equals_kept"] and row["drawn_equals_whole"] and row["open_s"] > 0 and row["lag_ms"]["p99"] >= 0
    assert found["search"]["common word"]["hits"] == 30 and found["text_equal"]


def test_percentiles():
    assert percentiles([0.001] * 99 + [0.5]) == {"p50": 1.0, "p95": 1.0, "p99": 500.0, "max": 500.0} and percentiles([]) == {}
