"""`dsv41chat conversations`: list, read, export, import, rename, delete and bring back. Never touches the engine."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from dsv41chat.store import NotFound, StoreDamaged, StoreError
from dsv41chat.store.conversations import unread
from dsv41chat.store.search import PAGE
from dsv41chat.ui import importing
from dsv41chat.ui.export import FORMATS, export, outline, readable
from dsv41chat.ui.inputs import read_stdin, read_text
from dsv41chat.ui.output import Out, UsageError
from dsv41chat.ui.sanitize import visible
from dsv41chat.ui.states import States, listing
from dsv41chat.ui.turn_events import exit_code
from dsv41chat.ui.units import size


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_commands(commands: Any) -> None:
    p = commands.add_parser("list", help="newest first", epilog="example: dsv41chat conversations list --search engram --limit 5")
    p.add_argument("--search", metavar="TEXT", help="in titles and texts")
    p.add_argument("--limit", type=_count, metavar="N")
    p.add_argument("--build", metavar="B", help="last answered by this build")
    p.add_argument("--archived", action="store_true", help="the deleted ones")
    p.set_defaults(run=_list)
    p = commands.add_parser("search", help="messages with these words, newest first", epilog='example: dsv41chat conversations search "engram table"')
    p.add_argument("words", metavar="WORD", nargs="+", help="all must occur; the last one may go on")
    p.add_argument("--limit", type=_count, metavar="N", default=PAGE, help=f"default {PAGE}")
    p.add_argument("--in", dest="only", metavar="ID", help="in this conversation only")
    p.set_defaults(run=_search)
    p = commands.add_parser("show", help="the text of one", epilog="example: dsv41chat conversations show 7f3a --thinking")
    p.add_argument("id", metavar="ID")
    branch = p.add_mutually_exclusive_group()
    branch.add_argument("--branch", metavar="LEAF", help="the branch that ends in this message")
    branch.add_argument("--tree", action="store_true", help="all branches, one line per message")
    p.add_argument("--thinking", action="store_true", help="with the thinking")
    p.set_defaults(run=_show)
    p = commands.add_parser("export", help="to a file or stdout", epilog="example: dsv41chat conversations export 7f3a --format json -o chat.json")
    p.add_argument("id", metavar="ID", nargs="?")
    p.add_argument("--all", action="store_true", help="every conversation")
    p.add_argument("--format", choices=FORMATS, help="default: md, with --json: json")
    p.add_argument("-o", "--output", metavar="PATH")
    p.add_argument("--force", action="store_true", help="with -o: overwrite")
    p.set_defaults(run=_export)
    p = commands.add_parser("import", help="our own JSON export", epilog="example: dsv41chat conversations import chat.json")
    p.add_argument("file", metavar="FILE", help="what `export --format json` wrote; - is standard input")
    p.set_defaults(run=_import)
    p = commands.add_parser("rename", help="give a title", epilog='example: dsv41chat conversations rename 7f3a "Sinkhorn notes"')
    p.add_argument("id", metavar="ID")
    p.add_argument("title", metavar="TITLE")
    p.set_defaults(run=_rename)
    p = commands.add_parser("delete", help="out of every list; kept for 30 days", epilog="example: dsv41chat conversations delete 7f3a --yes")
    p.add_argument("ids", metavar="ID", nargs="+")
    p.add_argument("--yes", action="store_true", help="do not ask")
    p.set_defaults(run=_delete)
    p = commands.add_parser("undelete", help="bring one back", epilog="example: dsv41chat conversations undelete 7f3a")
    p.add_argument("id", metavar="ID")
    p.set_defaults(run=_undelete)


def _list(context: Any) -> int:
    args = context.args
    store, trouble = context.store(), None
    try:
        rows = store.list_conversations(args.search, args.limit, build=args.build, deleted=args.archived)
    except StoreDamaged as error:
        if args.search or args.build:
            raise
        rows, trouble = [unread(c) for c in store.titles(deleted=args.archived)[: args.limit]], error
    cached: dict[str, int] = {}
    for state in listing(context.settings):
        cached[state["conversation"]] = cached.get(state["conversation"], 0) + state["bytes"]
    if args.json:
        context.json(
            [
                {
                    "id": row.id, "title": row.title, "messages": row.messages, "tokens": row.context_used, "build": row.build_name,
                    "cached": cached.get(row.id, 0), "created": row.created, "updated": row.updated, "deleted": row.deleted, "pinned": row.pinned,
                }
                for row in rows
            ]
        )  # fmt: skip
    elif rows:
        context.table(
            ("id", "messages", "tokens", "build", "cached", "updated", "title"),
            [
                (
                    r.id, "-" if r.messages is None else r.messages, "-" if r.context_used is None else r.context_used, r.build_name or "-",
                    size(cached[r.id]) if r.id in cached else "-", _when(r.updated), r.title,
                )
                for r in rows
            ],
        )  # fmt: skip
    else:
        context.stderr.notice("no conversations")
    return 0 if trouble is None else _told(context, trouble)


def _told(context: Any, trouble: StoreError) -> int:
    """Name on stderr what kept a part of the output away. Returns the exit code."""
    context.stderr.line(f"dsv41chat: {trouble}  Try: {trouble.hint}")
    return exit_code(trouble.code)


def _search(context: Any) -> int:
    args, store = context.args, context.store()
    only = store.conversation(args.only).id if args.only else None
    hits = store.search(" ".join(args.words), limit=args.limit, conversation_id=only).hits
    if args.json:
        rows = [
            {
                "conversation": hit.conversation_id, "message": hit.message_id, "title": hit.title, "role": hit.role, "created": hit.created,
                "excerpt": hit.excerpt, "match": [hit.start, hit.end],
            }
            for hit in hits
        ]  # fmt: skip
        context.json(rows)
    elif hits:
        rows = [(hit.conversation_id, hit.message_id, _when(hit.created), hit.role, hit.excerpt.strip()) for hit in hits]
        context.table(("id", "message", "written", "by", "text"), rows)
    else:
        context.stderr.notice("nothing found")
    return 0


def _show(context: Any) -> int:
    args, store = context.args, context.store()
    conversation = store.conversation(args.id)
    if args.json:
        context.json(export([conversation], store, "json", leaf=_leaf(context, conversation), tree=args.tree, parsed=True))
        return 0
    if args.tree:
        text = outline(conversation, store)
    else:
        text = readable(conversation, store.path_to(_leaf(context, conversation)), thinking=args.thinking)
    _page(context, text)
    return 0


def _leaf(context: Any, conversation: Any) -> str | None:
    branch = context.args.branch
    store = context.store()
    return store.shown_leaf(conversation.id) if branch is None else store.message(branch, conversation.id).id


def _page(context: Any, text: str) -> None:
    """To the pager on a terminal, else straight out."""
    if not context.out.terminal:
        context.out.write(text)
        return
    text = visible(text)
    pager = context.settings.environment.pager or "less -FX"
    try:
        # The user's own command line, as $PAGER is meant: the shell splits it.
        subprocess.run(pager, shell=True, input=text.encode("utf-8", "replace"), check=True)  # noqa: S602
    except (OSError, subprocess.CalledProcessError):
        context.out.write(text)


def _export(context: Any) -> int:
    args, store = context.args, context.store()
    if (args.id is None) == (not args.all):
        raise UsageError("export needs an ID or --all.", hint="dsv41chat conversations list")
    if args.force and not args.output:
        raise UsageError("--force needs -o.")
    chosen = store.titles() if args.all else [store.conversation(args.id)]
    lost: list[tuple[Any, StoreError]] = []
    unread = (lambda *found: lost.append(found)) if args.all else None
    text = export(chosen, store, args.format or ("json" if args.json else "md"), many=args.all, unread=unread)
    if lost and len(lost) == len(chosen):
        raise lost[0][1]  # a file without any conversation would save nothing
    out = Out(Path(args.output).expanduser(), force=args.force) if args.output else context.out
    out.write(visible(text) if out.terminal else text)
    out.close(True)
    if args.output:
        written = len(chosen) - len(lost)
        context.stderr.notice(f"{written} conversation{'s' if written != 1 else ''} written to {args.output}")
    for conversation, _ in lost:
        context.stderr.line(f'dsv41chat: not exported, it cannot be read: {conversation.id} "{conversation.title}"')
    return _told(context, lost[0][1]) if lost else 0


def _import(context: Any) -> int:
    """Nothing is overwritten: what is here already comes in as a second copy, and that is said."""
    name = context.args.file
    text = read_stdin(limit=None) if name == "-" else read_text(name, name, limit=None)
    if text is None:
        raise UsageError("import - needs piped input.")
    found = importing.read(text, "standard input" if name == "-" else name)
    store = context.store(write=True)
    stored = [(one, made, taken, store.message_count(made.id)) for one, made, taken in importing.store(found, store)]
    if context.args.json:
        rows = [{"id": made.id, "exported_id": one.id, "title": made.title, "messages": count} for one, made, _, count in stored]
        context.json({"ok": True, "conversations": rows})
        return 0
    for _, made, taken, count in stored:
        copy = f" (a copy: {taken} {'were' if taken.endswith('s') else 'was'} taken)" if taken else ""
        context.stderr.notice(f'imported {made.id} "{made.title}", {count:,} message{"s" if count != 1 else ""}{copy}')
    return 0


def _rename(context: Any) -> int:
    store = context.store(write=True)
    conversation = store.conversation(context.args.id)
    store.lock(conversation.id)
    store.rename(conversation.id, context.args.title)
    _done(context, [conversation.id])
    return 0


def _delete(context: Any) -> int:
    store = context.store(write=True)
    chosen = [store.conversation(ref) for ref in context.args.ids]
    if not context.args.yes:
        titles = ", ".join(f"{c.id} {c.title!r}" for c in chosen)
        if not context.confirm(f"Delete {titles}?"):
            context.stderr.notice("nothing was deleted")
            return 0
    store.on_deleted = States.of(context.settings).forget
    store.delete(*(c.id for c in chosen))
    _done(context, [c.id for c in chosen])
    return 0


def _undelete(context: Any) -> int:
    store = context.store(write=True)
    try:
        conversation = store.conversation(context.args.id, deleted=True)
    except NotFound:
        alive = store.conversation(context.args.id)  # raises when there is none at all
        raise UsageError(f"Conversation {alive.id} {alive.title!r} is not deleted.", hint=f"dsv41chat conversations show {alive.id}") from None
    store.undelete(conversation.id)
    _done(context, [conversation.id])
    return 0


def _done(context: Any, ids: list[str]) -> None:
    context.json({"ok": True, "ids": ids}) if context.args.json else context.stderr.notice(f"done: {', '.join(ids)}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
