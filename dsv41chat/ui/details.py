"""The numbers of one answer, as a page of text."""

from __future__ import annotations

from typing import Any

from dsv41chat.ui.present import duration
from dsv41chat.ui.turn_events import SHOWN_PARAMS
from dsv41chat.ui.units import size

TIMES = (
    ("load_s", "load"), ("resume_s", "resume"), ("prefill_s", "prefill"), ("first_token_s", "first token"), ("decode_s", "decode"),
    ("total_s", "total"),
)  # fmt: skip


def table_rows(stats: dict[str, dict]) -> list[tuple[str, str]]:
    """What the engine has read from its tables since it was loaded, one row per table and one for the means."""
    rows = []
    for name, table in stats.items():
        if name == "reader":
            continue
        batches = ", ".join(f"{count:,} {path}" for path, count in sorted(table["batches"].items()))
        text = f"{table['rows']:,} rows of {table['lookups']:,} lookups, {size(table['bytes'])}; batches: {batches or 'none'}"
        text += f"; waited {1e3 * table['wait_s']:,.0f} ms"
        if table["row_cache_hits"]:
            text += f"; {table['row_cache_hits']:,} from the row cache"
        rows.append((name, text))
        rows += [(name, f"{count:,} times: {reason}") for reason, count in table["fallbacks"].items()]
    if "reader" in stats:
        reader = stats["reader"]
        rows.append(("tables", f"probe {reader['probe']}, advice {reader['advise']}, scales {reader['scales']}"))
        rows += [("tables", f"{name} is not used: {reason}") for name, reason in reader["refused"].items()]
    return rows


def state_rows(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """What `States.stats` says: how much is kept, and how often what was not, with the reason."""
    if "off" in stats:
        return [("states", f"not kept: {stats['off']}")] if stats["off"] else []
    rows = [("states", f"{stats['entries']:,} kept, {size(stats['bytes'])} of {size(stats['budget'])}")]
    counts = stats["counters"].items()
    return rows + [("states", f"{name}: {size(count) if name.startswith('bytes') else f'{count:,}'}") for name, count in counts]


def details_text(
    message: Any,
    finish: Any = None,
    tables: dict[str, dict] | None = None,
    states: dict[str, Any] | None = None,
    memory: tuple[int, int] | None = None,
) -> str:
    """message: the stored answer. finish: the end of its turn while it is still known; it has drafting and reads.

    tables: the engine's table counters (all turns since it was loaded). states: of the prompt cache. memory: of the engine's arrays,
    now and at their peak, in bytes.
    """
    usage, timing, params = message.usage or {}, message.timing or {}, message.params or {}
    rows: list[tuple[str, str]] = [("build", f"{message.build_name} {str(message.build_fingerprint or '')[:12]}")]
    rows += [(name, duration(timing[key])) for key, name in TIMES if timing.get(key)]
    for key, name in (("prefill_tok_s", "prefill rate"), ("decode_tok_s", "decode rate")):
        if timing.get(key):
            rows.append((name, f"{timing[key]:,.1f} tok/s"))
    if usage:
        count = lambda name: f"{usage.get(name, 0):,}"  # an imported answer may lack some
        rows.append(("prompt", f"{count('prompt_tokens')} = {count('cached_tokens')} resumed + {count('prefilled_tokens')} prefilled"))
        rows.append(("answer", f"{count('thinking_tokens')} thinking + {count('answer_tokens')} answer"))
        rows.append(("context", f"{count('context_used')} of {count('context_limit')}"))
    for key in SHOWN_PARAMS:
        if key in params:
            rows.append((key, str(params[key])))
    draft = finish.draft if finish is not None else {}
    if draft.get("rounds"):
        rows.append(("rounds", f"{draft['rounds']:,}, proposed {draft.get('proposed', 0):,}, accepted {draft.get('accepted', 0):,}"))
        for depth, (proposed, accepted) in enumerate(draft.get("by_depth", []), 1):
            if proposed:
                rows.append((f"depth {depth}", f"{accepted:,} of {proposed:,} accepted ({100 * accepted / proposed:.0f}%)"))
    reads = finish.residency if finish is not None else {}
    if reads:
        rows.append(("table reads", f"{reads.get('cold_rows', 0):,} cold, {reads.get('warm_rows', 0):,} warm, {size(reads.get('bytes_read', 0))}"))
    if memory is not None:
        rows.append(("memory", f"{size(memory[0])} of arrays now, {size(memory[1])} at their peak"))
    rows += table_rows(tables or {})
    rows += state_rows(states) if states else []
    if message.ids_hash:
        rows.append(("ids hash", message.ids_hash))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
