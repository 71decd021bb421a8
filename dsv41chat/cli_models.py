"""`dsv41chat models`: which builds there are, what they are, and whether they are right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv41chat.engine.errors import EngineError, PackMissing
from dsv41chat.ui.output import UsageError


class VerificationFailed(EngineError):
    """A golden or a check of `models verify` does not hold. Exit 4."""

    code = "build_damaged"


def _chunks(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if not sizes or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def add_commands(commands: Any) -> None:
    p = commands.add_parser("list", help="registered builds, those in engine.model_dirs, the embedded one", epilog="example: dsv41chat models list")
    p.set_defaults(run=_list)
    p = commands.add_parser("info", help="everything about one", epilog="example: dsv41chat models info nano")
    p.add_argument("name", metavar="NAME")
    p.set_defaults(run=_info)
    p = commands.add_parser("add", help="register a folder; its files stay as they are", epilog="example: dsv41chat models add ~/models/V4.1-Flash")
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--name", metavar="N", help="default: the folder's name")
    p.set_defaults(run=_add)
    p = commands.add_parser("remove", help="forget a build; its files stay", epilog="example: dsv41chat models remove V4.1-Flash")
    p.add_argument("name", metavar="NAME")
    p.set_defaults(run=_remove)
    example = "example: dsv41chat models verify nano --goldens golden.safetensors"
    p = commands.add_parser("verify", help="config, shards, shapes, tokenizer; with --goldens logits", epilog=example)
    p.add_argument("name", metavar="NAME", help="a name or a folder")
    p.add_argument("--full", action="store_true", help="read every byte: checksums and scales; goes on where it was stopped")
    p.add_argument("--goldens", metavar="FILE", nargs="+", action="extend", default=[], help="reference logits")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 up to 1 GB of weights")
    p.add_argument("--atol", type=_positive, default=5e-4, metavar="F", help="tolerance of logits (default 5e-4)")
    p.add_argument("--chunks", type=_chunks, metavar="1,7,128", help="chunk sizes instead of the file's own")
    p.set_defaults(run=_verify)
    from dsv41chat import cli_convert, cli_fits, cli_prune

    for module in (cli_fits, cli_convert, cli_prune):
        module.add_command(commands)


def _list(context: Any) -> int:
    host, rows = context.host(), []
    for ref in host.builds():
        row = {"name": ref.name, "folder": str(ref.folder), "embedded": ref.embedded, "registered": ref.registered, "ok": True, "problem": None}
        try:
            row |= _facts(host.probe(ref))
            row["measured"] = _measured(context, row["fingerprint"])
        except EngineError as error:
            row |= {"ok": False, "problem": str(error)}
        rows.append(row)
    if context.args.json:
        context.json(rows)
        return 0
    head = ("name", "family", "size", "memory", "fits", "context", "drafter", "tables", "measured", "fingerprint")
    context.table(
        head,
        [
            (
                r["name"], r["family"], _size(r["bytes"]), _size(r["resident_bytes"]), r["fits"] or "-", r["admitted_context"],
                r["drafter"] or "-", _size(r["table_bytes"]), ", ".join(f["short"] for f in r["measured"].values()) or "-", r["fingerprint"][:12],
            )  # fmt: skip
            if r["ok"]
            else ("! " + r["name"], "-", "-", "-", "-", "-", "-", "-", "-", r["problem"])
            for r in rows
        ],
    )
    return 0


def _measured(context: Any, fingerprint: str) -> dict[str, dict[str, Any]]:
    """The newest perplexity and selfcheck of a build on this machine."""
    from dsv41chat.store.receipts import Receipts

    return Receipts(context.settings.paths.state).figures(fingerprint)


def _facts(view: Any) -> dict[str, Any]:
    return {
        "family": view.family, "fingerprint": view.fingerprint, "bytes": view.bytes, "resident_bytes": view.resident_bytes,
        "table_bytes": view.table_bytes, "context": view.context, "drafter": view.drafter, "has_tokenizer": view.has_tokenizer,
        "fits": view.admission.verdict if view.admission else None,
        "admitted_context": view.admission.context if view.admission else view.context,
    }  # fmt: skip


def _info(context: Any) -> int:
    host = context.host()
    ref = host.find(context.args.name)
    view = host.probe(ref)
    engine = context.settings.engine
    acting = ("qat_sim",) if view.family == "v4" else ("cache_quant", "linear_input_fp8")
    info = {"name": ref.name, "folder": str(ref.folder), "embedded": ref.embedded, "registered": ref.registered} | _facts(view)
    info |= {
        "defaults": dict(view.defaults), "notes": list(view.notes), "formats": dict(view.formats),
        "memory": _memory(view.admission, engine.memory_margin), "routes": host.routes(),
        "settings": {f"engine.{key}": getattr(engine, key) for key in ("routes", *acting)},
    }  # fmt: skip
    info["measured"] = _measured(context, view.fingerprint)
    if context.args.json:
        context.json(info)
        return 0
    shown = info | {name: f"{info[name]:,}" for name in ("bytes", "resident_bytes", "table_bytes")}
    shown |= {name: ", ".join(f"{key} {value}" for key, value in info[name].items()) or "-" for name in ("defaults", "settings")}
    shown["routes"] = "; ".join(info["routes"])
    shown["notes"] = "; ".join(info["notes"]) or "-"
    shown["formats"] = ", ".join(f"{count:,} {label}" for label, count in info["formats"].items()) or "-"
    shown["measured"] = "; ".join(figure["summary"] for figure in info["measured"].values()) or "-"
    shown["memory"] = _memory_words(view.admission)
    for name, value in shown.items():
        context.print(f"{name:15} {'-' if value is None else str(value).lower() if isinstance(value, bool) else value}")
    return 0


def _memory(admission: Any, margin: int | str) -> dict[str, Any] | None:
    if admission is None:
        return None
    plan = admission.plan
    return {
        "weights": plan.weights, "drafter": plan.drafter, "tables": plan.tables, "state_fixed": plan.fixed, "state_per_token": plan.per_token,
        "scratch": plan.scratch, "margin": plan.margin if margin == "auto" else margin, "decoded": plan.decoded,
        "copies": plan.copies,
        "words": admission.words, "remedies": list(admission.remedies),
    }  # fmt: skip


def _memory_words(admission: Any) -> str:
    if admission is None:
        return "-"
    plan = admission.plan
    decoded = f"; {plan.decoded:,} bytes of the weights come from decoding them on load" if plan.decoded else ""
    decoded += f"; {plan.copies:,} bytes are copies of matrices in the form that the route computes with" if plan.copies else ""
    remedies = f"; try {', '.join(admission.remedies)}" if admission.remedies else ""
    return f"{admission.words}; {plan.per_token:,.0f} bytes per token{decoded}{remedies}"


def _add(context: Any) -> int:
    folder = Path(context.args.folder).expanduser()
    if not folder.is_dir():
        raise PackMissing(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}.", hint="give the folder that holds the build")
    if not (folder / "config.json").is_file():
        raise PackMissing(f"{folder} has no config.json.", hint="give the folder that holds config.json and the .safetensors files")
    from dsv41chat.ui.turn_events import BuildRef

    host = context.host(write=True)
    ref = BuildRef(folder.name, folder)
    view = host.probe(ref)
    problem = _tokenizer_problem(host, ref, view)
    build = context.store(write=True).builds.add(folder, context.args.name, family=view.family, fingerprint=view.fingerprint)
    if context.args.json:
        added = {"ok": True, "name": build.name, "folder": str(build.folder), "family": build.family, "fingerprint": build.fingerprint}
        context.json(added | {"can_chat": problem is None, "problem": problem})
        return 0
    context.stderr.notice(f"{build.name}: {view.family}, {_size(view.bytes)}, registered")
    if problem is not None:
        context.stderr.notice(f"warning: {build.name} can be verified, not talked to: {problem}")
    else:
        fixed = context.settings.engine.model
        later = f"engine.model = {fixed} still answers by default" if fixed else "once it has answered it is the default; engine.model fixes one"
        context.stderr.notice(f"-m {build.name} talks to it; {later}")
    return 0


def _tokenizer_problem(host: Any, ref: Any, view: Any) -> str | None:
    """Why a build cannot chat, None if it can."""
    if not view.has_tokenizer:
        return "it has no tokenizer.json"
    try:
        host.load_tokenizer(ref)
    except EngineError as error:
        return str(error)
    return None


def _remove(context: Any) -> int:
    context.store(write=True).builds.remove(context.args.name)
    if context.args.json:
        context.json({"ok": True, "name": context.args.name})
    else:
        context.stderr.notice(f"{context.args.name}: no longer listed; its files are where they were")
    return 0


def _verify(context: Any) -> int:
    args, host = context.args, context.host()
    for path in args.goldens:
        if not Path(path).expanduser().is_file():
            raise UsageError(f"{path}: there is no such golden file.")
    ref = host.find(args.name)
    if args.goldens:
        if not host.probe(ref).has_tokenizer:
            context.stderr.notice(f"{ref.name} has no tokenizer.json: it can be verified, not talked to.")
        checks = []
        host.backend()
        for path in args.goldens:
            report = host.verify(ref, Path(path).expanduser(), dtype=args.dtype, atol=args.atol, chunks=args.chunks)
            if not report.checks:
                raise UsageError(f"{path}: no check of this file applies to {ref.name}.", hint="input_ids and logits are needed at least")
            checks += [asdict(check) for check in report.checks]
    else:
        checks = [_plain(found.name, found.what, found.checked) for found in _structure(context, host, ref)]
    ok = all(check["ok"] for check in checks if check["hard"])
    if args.json:
        contents = "logits" if args.goldens else "all" if args.full else "not read"
        context.json({"ok": ok, "contents": contents, "checks": [{name: _number(check[name]) for name in _FIELDS} for check in checks]})
        return 0 if ok else 4
    if args.goldens:
        context.table(("check", "mode", "n", "max abs", "top-1", "first bad", "verdict"), [_row(check) for check in checks])
    else:
        for check in checks:
            context.print(f"{check['name']:10} {'ok' if check['ok'] else '-':4} {check['what']}")
        if not args.full:
            context.print(f"{'contents':10} -    not read: --full reads every byte, --goldens compares logits")
    if not ok:
        bad = next(check for check in checks if check["hard"] and not check["ok"])
        where = f", first at position {bad['first_bad']}" if bad["first_bad"] is not None else ""
        raise VerificationFailed(f"{ref.name} does not match: {bad['name']} ({bad['mode']}){where}.", hint="compare the files with their source")
    return 0


def _structure(context: Any, host: Any, ref: Any) -> list[Any]:
    """The plain checks, and with --full every byte. Raises PackError at the first fault."""
    from dsv41chat.cli_convert import progress_line
    from dsv41chat.engine import verify_full, verify_plain

    host.backend()
    checks = list(verify_plain(ref.folder, cache_dir=context.settings.paths.cache))
    if context.args.full:
        done = context.store(write=True).facts
        checks += verify_full(ref.folder, done=done, progress=progress_line(context, "reading"))
    return checks


_FIELDS = ("name", "mode", "n", "max_abs", "top1", "first_bad", "hard", "ok")


def _plain(name: str, what: str, checked: bool) -> dict[str, Any]:
    """ok is null for a note: nothing was compared."""
    unused = dict.fromkeys(("mode", "n", "max_abs", "top1", "first_bad"))
    return {"name": name, **unused, "hard": checked, "ok": True if checked else None, "what": what}


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


def _row(check: dict[str, Any]) -> tuple[Any, ...]:
    verdict = "ok" if check["ok"] else "FAILED" if check["hard"] else "differs"
    first = "-" if check["first_bad"] is None else check["first_bad"]
    verdict += "" if check["hard"] else " (reported)"
    return check["name"], check["mode"], check["n"], f"{check['max_abs']:.3g}", f"{check['top1']:.4f}", first, verdict


def _size(count: int | None) -> str:
    """Bytes as people say them; "-" for none."""
    if not count:
        return "-"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
