"""`doctor drafting`: what drafts for a build, and what this machine needs to keep drafted text equal to plain text."""

from __future__ import annotations

from dsv41chat.engine.checks import Line
from dsv41chat.engine.draft.shared import Drafting


def examine(drafting: Drafting, measure: bool = True) -> list[Line]:
    """Lines about drafter, row verdicts and costs. measure: time windows and drafter, and store what they take."""
    if drafting.model is None:
        if drafting.fault is None:
            return [Line("ok", "drafter", "none in this build; answers are decoded plainly")]
        return [Line("warn", "drafter", drafting.fault, "answers are decoded plainly; convert or copy the build again")]
    lines = [Line("ok", "drafter", f"{drafting.kind}, up to {drafting.block} tokens a round")]
    if drafting.exact == "fast":
        lines.append(Line("warn", "exact", "fast: drafted text may differ from plain text at near-ties", "engine.exact = on makes them equal"))
    if words := drafting.trunk.routes.draft_words:
        lines.append(Line("ok", "passes", words))
    verdicts = drafting.verdicts()
    single = [v for v in verdicts if v.tokenwise]
    if verdicts:
        lines.append(Line("ok", "row check", f"{len(verdicts) - len(single)} operations batched, {len(single)} row by row"))
    lines += [Line("ok", "row by row", str(v)) for v in single]
    if measure:
        drafting.calibrate()
    if drafting.costs.known:
        one, rows = drafting.costs.rows[0], drafting.costs.rows
        ratios = " ".join(f"{c / one:.2f}" for c in rows[1:])
        text = f"a plain step {1000 * one:.1f} ms; 2 to {len(rows)} rows {ratios} times that; drafter {drafting.costs.draft / one:.2f}"
        lines.append(Line("ok", "costs", text))
    return lines
