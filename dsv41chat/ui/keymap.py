"""Every action of the full screen in one table: key, name and one sentence. Bindings, key line, help and palette come from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from textual.binding import Binding

GLOBAL, CHAT, COMPOSER, TRANSCRIPT = "everywhere", "chat", "composer", "transcript"
CONTEXTS = (CHAT, COMPOSER, TRANSCRIPT, GLOBAL)


@dataclass(frozen=True)
class Key:
    """id: the name for `[keys]` in the config. key: comma-separated defaults, empty for palette only. action: of the screen.

    title and help: what the palette and the help page show. short: label in the key line, empty to leave it out.
    fixed: part of the editor itself, listed in the help but not bound by us; its action is the palette's way.
    """

    id: str
    key: str
    action: str
    title: str
    help: str
    context: str = CHAT
    short: str = ""
    priority: bool = False
    fixed: bool = False


KEYS: tuple[Key, ...] = (
    Key("chat.stop", "escape", "escape", "Stop / close", "Stops the answer; else closes what is open; else goes to the composer", CHAT, "stop", True),
    Key("app.palette", "ctrl+p", "app.command_palette", "Commands", "Lists every action, with a search", GLOBAL, "commands", True),
    Key("list.open", "ctrl+o", "conversations", "Conversations", "Lists conversations and searches their text", CHAT, "conversations", True),
    Key("chat.new", "ctrl+n", "new_conversation", "New conversation", "Starts an empty conversation", CHAT, "new", True),
    Key("app.help", "f1", "help", "Help", "Shows all keys and where to read more", GLOBAL, "help", True),
    Key("build.menu", "f2", "builds", "Switch build", "Lists the model builds with size, fit and context", CHAT, "", True),
    Key("view.sidebar", "f3", "sidebar", "Sidebar", "Shows or hides the list of conversations at the left", CHAT, "", True),
    Key("view.details", "f4", "details", "Turn details", "Shows times, acceptance and reads of the last answer", CHAT, "", True),
    Key("app.settings", "f8", "settings", "Settings", "Shows and changes settings and where each value comes from", CHAT, "", True),
    Key("chat.interrupt", "ctrl+c", "interrupt", "Copy / stop / clear", "Copies a selection; else stops; else clears; twice quits", CHAT, "", True),
    Key("app.quit", "ctrl+q", "quit_asking", "Quit", "Leaves the program; asks once while an answer runs", CHAT, "", True),
    Key("chat.regenerate", "ctrl+r", "regenerate", "Regenerate", "One more answer to the last question, as a new branch", CHAT, "", True),
    Key("chat.thinking", "ctrl+t", "toggle_thinking", "Fold thinking", "Folds or unfolds the thinking of the last answer", CHAT, "", True),
    Key("compose.editor", "ctrl+g", "external_editor", "Edit in $EDITOR", "Opens the composer's text in your editor", COMPOSER, "", True),
    Key("chat.find", "ctrl+f", "find", "Find", "Searches in this conversation", CHAT, "", True),
    Key("view.redraw", "ctrl+l", "redraw", "Redraw", "Draws the whole screen again", CHAT, "", True),
    Key("view.page_up", "pageup", "page(-1)", "Page up", "Scrolls the transcript up by a screen", CHAT, "", True),
    Key("view.page_down", "pagedown", "page(1)", "Page down", "Scrolls the transcript down by a screen", CHAT, "", True),
    Key("view.home", "ctrl+home", "transcript_home", "To the start", "Goes to the first message", CHAT, "", True),
    Key("view.end", "ctrl+end", "transcript_end", "To the end", "Goes to the newest text and follows it", CHAT, "", True),
    *(
        Key(f"list.recent{n}", f"alt+{n}", f"recent({n})", f"Recent conversation {n}", f"Opens conversation {n} of the recent ones", CHAT, "", True)
        for n in range(1, 10)
    ),
    Key("app.welcome", "", "welcome", "First steps", "What to do without a build of your own, and what this machine could hold"),
    Key("chat.continue", "", "continue_answer", "Continue the answer", "Goes on from the kept text of a stopped answer"),
    Key("chat.show_thinking", "", "thinking_all('show')", "Always show thinking", "Unfolds the thinking of every answer"),
    Key("chat.fold_thinking", "", "thinking_all('fold')", "Always fold thinking", "Folds the thinking of every answer"),
    Key("chat.hide_thinking", "", "thinking_all('hide')", "Hide thinking", "Leaves thinking out of the view"),
    Key("chat.effort", "", "ask_effort", "Thinking effort", "How long the model thinks in this conversation: off, low, high, max"),
    Key("chat.system", "", "ask_option('system')", "System prompt", "Text that every answer of this conversation is to follow"),
    Key("chat.set", "", "ask_option('set')", "Sampling option", "temperature, top-p and others of this conversation, as in /set temperature 0.7"),
    Key("chat.rename", "", "rename", "Rename conversation", "Gives this conversation another title"),
    Key("chat.pin", "", "pin", "Pin conversation", "Keeps this conversation on top and its newest states stored, or no longer"),
    Key("chat.undelete", "", "undelete", "Restore a conversation", "Brings a deleted conversation back"),
    Key("chat.delete", "", "delete_conversation", "Delete conversation", "Deletes this conversation; it can be restored for 30 days"),
    Key("chat.fork", "", "fork", "Fork conversation", "Copies this branch into a new conversation"),
    Key("chat.export", "", "export", "Export", "Writes this conversation to a file"),
    Key("chat.import", "", "import", "Import", "Brings conversations back from a JSON export; nothing is overwritten"),
    Key("chat.save_only", "", "save_only", "Save the edit only", "Stores the edited message as a branch without asking for an answer"),
    Key("chat.queue_send", "", "send_queued", "Send queued messages", "Sends what waits in the queue"),
    Key("chat.queue_clear", "", "clear_queue", "Clear the queue", "Removes what waits in the queue"),
    Key("chat.search_all", "", "search_everywhere", "Search everywhere", "Searches the text of all conversations"),
    Key("chat.save_again", "", "save_again", "Save again", "Brings a conversation that could not be saved to the disk"),
    Key("chat.takeover", "", "take_over", "Take over", "Writes in a conversation whose other process is gone"),
    Key("build.add", "", "builds(True)", "Add a build", "Asks for the folder of a build on disk; its files stay where they are"),
    Key("compose.attach", "", "attach_file", "Attach a file", "Puts a text file into the message"),
    Key("paste.expand", "", "expand_paste", "Expand paste", "Puts the text of pasted chips into the composer"),
    Key("view.theme", "", "app.change_theme", "Theme", "Chooses colours: dark, light, high contrast, the terminal's own and more", GLOBAL),
    Key("view.mouse", "", "toggle_mouse", "Mouse on / off", "Off gives the terminal its own selection back"),
    Key("compose.send", "enter", "send", "Send", "Sends the message; a running answer queues it", COMPOSER, "send", fixed=True),
    Key("compose.newline", "ctrl+j", "newline", "New line", "Starts a line; shift+Enter, alt+Enter, ctrl+Enter where reported", COMPOSER, fixed=True),
    Key("compose.history", "up,down", "history", "Prompt history", "On the first or last line: what was sent before", COMPOSER, fixed=True),
    Key("compose.undo", "ctrl+z", "undo", "Undo", "Undoes the last change in the composer", COMPOSER, fixed=True),
    Key("compose.complete", "tab", "", "Complete", "Completes /commands and @files; else goes to the transcript", COMPOSER, fixed=True),
    Key("message.previous", "up,k", "select(-1)", "Previous message", "Selects the message above", TRANSCRIPT),
    Key("message.next", "down,j", "select(1)", "Next message", "Selects the message below", TRANSCRIPT),
    Key("message.first", "g,home", "select_edge(False)", "First message", "Selects the first message", TRANSCRIPT),
    Key("message.last", "G,end", "select_edge(True)", "Last message", "Selects the last message and follows", TRANSCRIPT),
    Key("message.unfold", "enter,t", "fold_selected", "Unfold", "Folds or unfolds the thinking of the selected answer", TRANSCRIPT),
    Key("message.copy", "c", "copy_message", "Copy message", "Copies the source of the selected message", TRANSCRIPT, "copy"),
    Key("message.code", "y", "copy_code", "Copy code", "Copies a code block of the selected message", TRANSCRIPT, "code"),
    Key("message.edit", "e", "edit_message", "Edit", "Edits a message of yours as a new branch; goes on from an answer", TRANSCRIPT, "edit"),
    Key("message.regenerate", "r", "regenerate_selected", "Answer again", "One more answer beside the selected one", TRANSCRIPT, "again"),
    Key("branch.previous", "left_square_bracket", "sibling(-1)", "Previous branch", "Shows the branch before", TRANSCRIPT, "branch"),
    Key("branch.next", "right_square_bracket", "sibling(1)", "Next branch", "Shows the branch after", TRANSCRIPT),
    Key("branch.list", "b", "branches", "Branches", "Lists the branches at the selected message", TRANSCRIPT),
    Key("branch.delete", "d", "delete_branch", "Delete branch", "Deletes the selected message and all below it (asks)", TRANSCRIPT),
    Key("view.wrap", "w", "wrap_code", "Wrap code", "Wraps long code lines or lets them run off the view", TRANSCRIPT),
    Key("view.left", "left", "shift(-1)", "Code left", "Moves long code lines and wide tables to the left", TRANSCRIPT),
    Key("view.right", "right", "shift(1)", "Code right", "Moves long code lines and wide tables to the right", TRANSCRIPT),
    Key("message.pager", "o", "pager", "Open in $PAGER", "Shows the selected message in your pager", TRANSCRIPT),
    Key("message.mark", "m", "mark", "Mark", "Marks the selected message", TRANSCRIPT),
    Key("find.open", "slash", "find", "Find", "Searches in this conversation", TRANSCRIPT, "find"),
    Key("find.next", "n", "find_step(1)", "Next hit", "Goes to the next place found", TRANSCRIPT),
    Key("find.previous", "N", "find_step(-1)", "Previous hit", "Goes to the place found before", TRANSCRIPT),
    Key("message.suspend", "ctrl+z", "app.suspend_process", "Suspend", "Returns to the shell; `fg` comes back", TRANSCRIPT),
)


def bindings(context: str, prefix: str = "screen.") -> list[Binding]:
    """Textual bindings of one context. Actions without a namespace belong to the screen."""
    made = []
    for key in KEYS:
        if key.context == context and key.key and not key.fixed:
            action = key.action if key.action.startswith("app.") else f"{prefix}{key.action}"
            made.append(Binding(key.key, action, key.title, show=False, priority=key.priority, id=key.id, tooltip=key.help))
    return made


def clashes(keymap: Mapping[str, str]) -> list[str]:
    """Sentences about user keys that name no action or that meet another action of the same context."""
    problems = []
    known = {key.id: key for key in KEYS}
    for name in keymap:
        if name not in known:
            problems.append(f"[keys] {name}: there is no such action")
        elif known[name].fixed:
            problems.append(f"[keys] {name}: this key belongs to the editor and cannot be moved")
    taken: dict[tuple[str, str], str] = {}
    for key in KEYS:
        for one in filter(None, keymap.get(key.id, key.key).split(",")):
            for context in (key.context,) if key.context in (COMPOSER, TRANSCRIPT) else CONTEXTS:
                other = taken.setdefault((context, one.strip()), key.id)
                if other != key.id and (other in keymap or key.id in keymap):
                    problems.append(f"[keys] {one.strip()}: both {other} and {key.id}")
    return sorted(set(problems))


NAMES = {
    "escape": "esc", "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/", "pageup": "PgUp", "pagedown": "PgDn",
    "enter": "Enter",
}  # fmt: skip


def display(key: str) -> str:
    """A key as people write it: ctrl+P, F1, esc."""
    shown = []
    for one in key.split(","):
        parts = one.strip().split("+")
        last = NAMES.get(parts[-1], parts[-1])
        if len(last) == 1 and len(parts) > 1:
            last = last.upper()
        elif last[:1] == "f" and last[1:].isdigit():
            last = last.upper()
        shown.append("+".join([*parts[:-1], last]))
    return " ".join(shown)


def shown_keys(keymap: Mapping[str, str], contexts: Iterable[str]) -> list[tuple[str, str]]:
    """(key, short label) of the actions that belong into the key line."""
    wanted = set(contexts)
    return [(display(keymap.get(key.id, key.key).split(",")[0]), key.short) for key in KEYS if key.short and key.context in wanted]
