"""The part of the chat screen that changes things: slash commands, settings, builds, the way to a full disk or context."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from dsv41chat.config_file import set_config, unset_config
from dsv41chat.engine.errors import Cancelled, EngineError
from dsv41chat.settings import KEYS, ConfigError
from dsv41chat.store import StoreError
from dsv41chat.ui.commands import EFFORTS, NAMES, CommandError, complete, parse, parse_option
from dsv41chat.ui.present import duration, notice
from dsv41chat.ui.render.entry import ANSWER
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.dialogs import AskScreen, LineScreen
from dsv41chat.ui.status import loading_text
from dsv41chat.ui.units import size

LOADING_S = 1.0
RESUMING_S, RESUMING = 0.5, "resuming"


class SettingsActions:
    """Mixed into ChatScreen."""

    def init_settings(self) -> None:
        self.new_settings: dict[str, Any] = {}
        self.switching = False
        self._loading_entry: Any = None
        self._switch_cancel = threading.Event()

    # Slash commands -----------------------------------------------------------------------------------------------------

    def run_command(self, text: str) -> None:
        """Carries a command out and clears the composer; an error is shown and the text stays.

        The composer is empty before: a command that leaves the conversation must not be stored as what is being written in it.
        """
        composer = self.composer
        typed = composer.expanded().rstrip("\n") == text
        before, chips, place = composer.text, dict(composer.chips), composer.cursor_location
        try:
            command, rest = parse(text)
            if typed:
                composer.reset()
            getattr(self, f"_command_{command.name}")(rest)
        except CommandError as error:
            self.tell(str(error), "error")
            if typed and composer.text != before:
                composer.reset(before)
                composer.chips.update(chips)
                composer.move_cursor(place)

    def action_ask_effort(self) -> None:
        choices = [(name, name) for name in EFFORTS]
        self.app.push_screen(AskScreen("Thinking effort of this conversation", choices), lambda name: name and self._commanded("effort", name))

    def action_ask_option(self, name: str) -> None:
        """The rest of the command `name`, in a line of its own: the composer may hold a draft."""
        words = f"/{name} {NAMES[name].arguments}"
        page = LineScreen(words, check=_wrong_option if name == "set" else lambda rest: "")
        self.app.push_screen(page, lambda rest: rest and self._commanded(name, rest))

    def _commanded(self, name: str, rest: str) -> None:
        self.run_command(f"/{name} {rest}")

    def complete_command(self, text: str) -> list[str]:
        return complete(text, lambda: [ref.name for ref in self.app.host.builds()])

    def _command_new(self, rest: str) -> None:
        self.action_new_conversation()

    def _command_open(self, rest: str) -> None:
        if rest:
            self._open_soon(rest)
        else:
            self.action_conversations()

    def _command_build(self, rest: str) -> None:
        if rest:
            self.switch_build(rest)
        else:
            self.action_builds()

    def _command_system(self, rest: str) -> None:
        self.change_option("system", rest)

    def _command_effort(self, rest: str) -> None:
        self._command_set(f"effort {rest}")

    def _command_set(self, rest: str) -> None:
        self.change_option(*parse_option(rest))

    def _command_copy(self, rest: str) -> None:
        entry = self._last(ANSWER)
        if entry is None:
            raise CommandError("There is no answer to copy yet.")
        if not rest:
            self.copy_text(entry.text, "answer")
            return
        blocks = entry.code_blocks()
        if not rest.isdigit() or not 1 <= int(rest) <= len(blocks):
            raise CommandError(f"The last answer has {len(blocks)} code blocks.")
        self.copy_text(blocks[int(rest) - 1], "code")

    def _command_export(self, rest: str) -> None:
        self.export_command(rest)

    def _command_retry(self, rest: str) -> None:
        self.action_regenerate()

    def _command_continue(self, rest: str) -> None:
        self.action_continue_answer()

    def _command_branch(self, rest: str) -> None:
        entry = next((one for one in reversed(self.transcript.entries) if one.branch), None)
        if entry is None:
            raise CommandError("This conversation has no branches here.")
        self.transcript.selected = self.transcript.index_of(entry)
        if not rest:
            self.action_branches()
            return
        siblings = self.app.store.siblings(entry.message.id)
        if not rest.isdigit() or not 1 <= int(rest) <= len(siblings):
            raise CommandError(f"There are branches 1 to {len(siblings)}.")
        self._show_branch(siblings[int(rest) - 1], entry)

    def _command_read(self, rest: str) -> None:
        if not rest:
            raise CommandError("/read needs the name of a file.")
        self.attach(rest, f"/read {rest}")

    def _command_pin(self, rest: str) -> None:
        if self.conversation is None:
            raise CommandError("There is nothing to pin yet.")
        pinned = not self.conversation.pinned
        try:
            self.app.store.pin(self.conversation.id, pinned)
        except StoreError as error:
            raise CommandError(str(error)) from error
        self.refresh_conversation()
        self.tell(f"{'Pinned.' if pinned else 'No longer pinned.'} {self.app.host.states.pin(self.conversation.id, pinned)}".strip())

    def action_pin(self) -> None:
        try:
            self._command_pin("")
        except CommandError as error:
            self.tell(str(error), "error")

    def _command_stats(self, rest: str) -> None:
        self.action_details()

    def _command_help(self, rest: str) -> None:
        self.action_help()

    def _command_quit(self, rest: str) -> None:
        self.action_quit_asking()

    # Settings -----------------------------------------------------------------------------------------------------------

    def action_settings(self) -> None:
        from dsv41chat.ui.screens.settings import SettingsScreen

        self.app.push_screen(SettingsScreen(self))

    def _record(self) -> Any:
        """The conversation, or what stands for it before there is one."""
        return self.conversation if self.conversation is not None else _Draft(self.new_settings)

    def option_values(self) -> dict[str, tuple[Any, str]]:
        """Every option of this conversation's next turn as (value, origin), the system prompt among them."""
        values = dict(self.app.settings.turn_values(self._record(), self.app.host.view))
        values.setdefault("seed", (None, "default"))
        own = self._record().settings.get("system")
        if self.conversation is None and own is None:
            own = self.app.begin.system
        default = "" if self.conversation is not None else self.app.settings.chat.system
        values["system"] = (default, "default") if own is None else (own, "conversation")
        return values

    def rewrite_cost(self) -> str:
        """What a change of the prompt's start means for the next turn."""
        used = self.status.context_used
        if not used:
            return ""
        rate = self.status.prefill_rate
        about = f", about {duration(used / rate)}" if rate else ""
        return f"After a change the next turn prefills all {used:,} tokens{about}."

    def change_option(self, name: str, value: Any) -> bool:
        """Sets an option of this conversation; None: back to what it would be without. Returns whether it was stored."""
        if self.readonly:
            self.tell("This conversation is read-only here.", "warning")
            return False
        settings = {key: held for key, held in self._record().settings.items() if key != name}
        if value is not None:
            settings[name] = value
        if self.conversation is None:
            self.new_settings = settings
        else:
            try:
                self.app.store.set_settings(self.conversation.id, settings)
            except StoreError as error:
                self.tell(f"{name} was not changed: {error}", "error")
                return False
            self.refresh_conversation()
        self.app.apply_settings(self.app.settings.released(name))
        cost = self.rewrite_cost() if name in ("system", "effort") else ""
        self.tell(f"{name}: {'default' if value is None else value}. {cost}".strip())
        self.show_header()
        return True

    def change_key(self, name: str, value: Any) -> bool:
        """Sets a key of the config file and applies it; None: takes it out, so that its default counts. Returns whether that was done."""
        key, path = KEYS[name], self.app.settings.paths.config
        text = ("true" if value else "false") if isinstance(value, bool) else ":".join(value) if isinstance(value, tuple) else str(value)
        try:
            if value is None:
                unset_config(path, name)
            else:
                set_config(path, name, text)
        except (ConfigError, OSError, StoreError) as error:
            self.tell(str(error), "error")
            return False
        self.app.apply_settings(self.app.settings.changed(name, value))
        self.apply_interface()
        if key.section == "engine" and name not in ("engine.model", "engine.draft"):
            self.tell(f"{name} counts when the build is loaded again (F2).")
        return True

    def apply_interface(self) -> None:
        """Brings the screen in line with the settings."""
        ui = self.app.settings.ui
        self.transcript.configure(wrap_code=ui.wrap_code, math=ui.math)
        self.composer.burst_paste = ui.burst_paste
        self.composer.cursor_blink = not ui.reduced_motion
        if self.thinking_view != ui.thinking:
            self.action_thinking_all(ui.thinking)
        self._sidebar_wanted = None
        self._place_sidebar(self.size.width)
        self.show_header()

    # Builds -------------------------------------------------------------------------------------------------------------

    def action_builds(self, add: bool = False) -> None:
        from dsv41chat.ui.screens.builds import BuildsScreen

        cost = f"Switching now: history {self.status.context_used:,} tokens must be prefilled by the new build." if self.status.context_used else ""
        if cost and self.status.prefill_rate:
            cost = cost[:-1] + f", about {duration(self.status.context_used / self.status.prefill_rate)}."
        menu = BuildsScreen(self.app.host, self.app.store, cost, busy=self.pump.running, add=add)
        self.app.push_screen(menu, self._build_chosen)

    def _build_chosen(self, name: str | None) -> None:
        if name:
            self.switch_build(name)
        elif name == "":
            self.action_welcome()

    def action_welcome(self) -> None:
        """The page for somebody without a build."""
        from dsv41chat.ui.screens.welcome import WelcomeScreen

        self.app.push_screen(WelcomeScreen(self.app.host, self.app.begin.backend_missing), self._welcomed)

    def _welcomed(self, choice: str | None) -> None:
        if choice == "add":
            self.action_builds(add=True)
        elif choice == "convert":
            from dsv41chat.ui.screens.welcome import CONVERT

            self.show_text("From an original checkpoint", CONVERT)

    def switch_build(self, name: str) -> None:
        """Loads another build; the header changes when it is there, and the old one stays when it fails."""
        try:
            ref = self.app.host.find(name)
        except EngineError as error:
            self.tell(str(error), "error")
            return
        if self.switching:
            self.tell("A build is being loaded; esc cancels.", "warning")
        elif self.app.host.loaded(ref):
            self._bound(ref.name)
        else:
            if self.pump.running:
                self.tell(f"{ref.name} is loaded when the answer has ended; esc stops it.")
            self.spawn(self._load_if_it_fits(ref, quiet=False), "fit")

    def preload(self) -> None:
        """Loads the build that will answer while the user reads and writes; nothing happens where it cannot be loaded."""
        if self.app.readonly or self.app.begin.backend_missing or self.app.host.engine is not None or self.switching or self.pump.running:
            return
        try:
            ref = self.app.host.resolve(self.app.build, self.conversation)
        except EngineError:
            # The conversation's first line says it already.
            return
        if absent := self.app.host.absent_notice(ref):
            self.add_notice(visible_line(absent))
        self.spawn(self._load_if_it_fits(ref, quiet=True), "fit")

    async def _load_if_it_fits(self, ref: Any, quiet: bool) -> None:
        """Loads at once what fits; asks where memory is tight or short, with the whole sum."""
        try:
            admission = (await asyncio.to_thread(self.app.host.probe, ref)).admission
        except (EngineError, OSError):
            # The load itself says what is wrong with the folder.
            admission = None
        verdict = admission.verdict if admission is not None else "fits"
        if verdict == "fits":
            self.spawn(self._switch(ref, quiet), "switch", exclusive=False)
            return
        words = "Memory is tight for" if verdict == "tight" else "Memory is too small for"
        remedies = f"\nInstead: {'; '.join(admission.remedies)}" if admission.remedies else ""
        question = f"{words} {ref.name}.\n{admission.words}{remedies}"
        choices = [("no", "do not load it"), ("yes", "load it" if verdict == "tight" else "load it all the same")]
        self.app.push_screen(AskScreen(question, choices), lambda answer: self._load_asked(ref, quiet, verdict, answer))

    def _load_asked(self, ref: Any, quiet: bool, verdict: str, answer: str | None) -> None:
        if answer == "yes":
            self.app.host.force = self.app.host.force or verdict == "no"
            self.spawn(self._switch(ref, quiet), "switch", exclusive=False)

    def prepare(self) -> None:
        """Brings back the state of the conversation on screen while the user reads; says how much is ready, or why nothing is."""
        if self.conversation is not None and self.app.host.engine is not None and not self.pump.running:
            self.spawn(self._prepare(self.conversation.id), "prepare", exclusive=True)

    async def _prepare(self, conversation_id: str) -> None:
        slow = self.set_timer(RESUMING_S, self._still_resuming)
        try:
            found = await asyncio.to_thread(self.app.controller.prepare, conversation_id)
        except (EngineError, StoreError):
            # The next turn meets the same and says it.
            return
        finally:
            slow.stop()
            if self.status.phase == RESUMING:
                self.status.phase = "idle"
                self.show_status()
        if found is None or self.conversation is None or self.conversation.id != conversation_id:
            return
        if found.trouble is not None:
            self.tell(found.trouble, "warning")
        if found.tokens:
            self.tell(f"ready: resumed {found.tokens:,} tokens in {duration(found.seconds)}")
        elif found.cold is not None:
            self.tell(f"cold: {found.cold}")

    def _still_resuming(self) -> None:
        if self.status.phase == "idle":
            self.status.phase = RESUMING
            self.show_status()

    async def _switch(self, ref: Any, quiet: bool = False) -> None:
        if quiet and (self.pump.running or self.app.host.engine is not None):
            # A turn was faster: it loads the build itself.
            return
        self.switching = True
        self._switch_cancel.clear()
        if not self.pump.running:
            self.status.phase = "loading"
            self.show_status()
        if self.pump.running:
            self.stop_turn()
            while self.pump.running:
                await asyncio.sleep(0.02)
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        try:
            await asyncio.to_thread(self._load, ref, lambda event: loop.call_soon_threadsafe(self._loading, event, began))
        except Cancelled:
            self._not_switched(ref, "cancelled")
        except EngineError as error:
            self._not_switched(ref, str(error), error.hint)
        except Exception as error:  # noqa: BLE001 - whatever a load does, the old build must answer and the user must know
            self._not_switched(ref, f"{type(error).__name__}: {error}")
        else:
            self._bound(ref.name, quiet)
        finally:
            self.switching = False
            if not self.app.leaving:
                self._hide_loading()
                self.status.phase = "idle"
                self.show_status()
        if self.app.leaving:
            return
        if self.app.host.engine is not None:
            self.send_waiting()
        elif self.held:
            self.composer.put_before(self.held)
            self.held = ""
            self.show_queue(self.queue)

    def _load(self, ref: Any, progress) -> None:
        for event in self.app.host.load(self.app.host.probe(ref), self._switch_cancel.is_set):
            progress(event)

    def _loading(self, event: Any, began: float) -> None:
        if self.app.leaving:
            # Called from the engine thread, perhaps after the screen has gone.
            return
        self.status.phase = loading_text(event)
        if event.unit == "bytes" and event.done and event.total > event.done:
            rate = event.done / max(1e-3, time.monotonic() - began)
            self.status.phase += f" {size(rate)}/s {duration((event.total - event.done) / rate)} left"
        self.show_status()
        if time.monotonic() - began >= LOADING_S:
            self._show_loading(event)

    def _show_loading(self, event: Any) -> None:
        """What a long load is doing, in the transcript; the lines go when it ends."""
        share = event.done / event.total if event.total else 0.0
        bar = "█" * round(20 * share) + "░" * (20 - round(20 * share))
        text = (
            f"{event.stage:8} {bar} {100 * share:3.0f}%  {self.status.phase}\n"
            "You can read, search and write already; the first message is sent when loading ends. esc cancels."
        )
        self._hide_loading()
        self._loading_entry = notice(text, "loading")
        self.transcript.append(self._loading_entry)

    def _hide_loading(self) -> None:
        if self._loading_entry is not None:
            self.transcript.drop(self._loading_entry)
            self._loading_entry = None

    def _bound(self, name: str, quiet: bool = False) -> None:
        if not quiet:
            self.app.build = name
        if self.app.leaving:
            return
        view = self.app.host.view
        self._header_build = view.name if view is not None else name
        if self.app.host.engine is not None:
            self.status.context_limit = self.app.host.engine.context_limit
            self.count_context()
            self.prepare()
        self.show_header()
        if not quiet:
            self.tell(f"{name} answers from now on.")

    def _not_switched(self, ref: Any, why: str, hint: str = "") -> None:
        if self.app.leaving:
            return
        now = self.app.host.view
        who = f"{now.name} goes on answering." if now is not None else "No build is loaded; the conversation is all there."
        remedy = f"\n→ {visible_line(hint)}" if hint else ""
        self.add_notice(f"{ref.name} was not loaded: {why}{remedy}\n{who}", error=True)
        self.show_header()

    def stop_loading(self) -> None:
        """The program ends: nobody waits for the build any more."""
        self._switch_cancel.set()

    def cancel_switch(self) -> bool:
        if not self.switching:
            return False
        self._switch_cancel.set()
        self.tell("Cancelling: the file that is being read must finish first.")
        return True


def _wrong_option(rest: str) -> str:
    """What is wrong with "NAME VALUE"; nothing at all closes the dialog."""
    try:
        parse_option(rest or "seed random")
    except CommandError as error:
        return str(error)
    return ""


class _Draft:
    """Stands for a conversation that does not exist yet."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
