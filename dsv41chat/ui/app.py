"""The full screen application: start, themes, signals, and the way out that leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.driver import Driver
from textual.notifications import Notify
from textual.screen import Screen
from textual.theme import Theme, ThemeProvider

from dsv41chat.config_file import set_config
from dsv41chat.settings import ConfigError
from dsv41chat.store import Store, StoreError
from dsv41chat.ui.background import ask_terminal
from dsv41chat.ui.keymap import KEYS, clashes, display
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.chat import ChatScreen
from dsv41chat.ui.screens.dialogs import Page
from dsv41chat.ui.screens.small import TooSmallScreen, fits
from dsv41chat.ui.themes import OWN
from dsv41chat.ui.turn import TurnController
from dsv41chat.ui.turn_events import AppStart
from dsv41chat.ui.widgets.field import CommandPage

if TYPE_CHECKING:
    from dsv41chat.settings import Settings

log = logging.getLogger(__name__)

SHORT = 16
RECENT = 9
STOP_WAIT_S = 5.0
WARM_UP_S = 0.5


class ChatApp(App[int]):
    """controller: with the store, the host and the settings, all made by the caller, who also closes them."""

    CSS_PATH = "app.tcss"
    TITLE = "dsv41chat"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-normal"), (120, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall")]
    BINDINGS = [Binding("ctrl+q", "quit_now", "Quit", show=False, system=True)]

    def __init__(self, controller: TurnController, start: AppStart | None = None):
        super().__init__()
        self.controller = controller
        self.settings: Settings = controller.settings
        self.store = controller.store
        self.host = controller.host
        self.begin = start or AppStart()
        self.build = self.begin.build
        self.readonly = self.begin.readonly or self.store.readonly
        self.unsaved = "" if self.store.path is not None else self.begin.unsaved or "memory"
        self._said = ""
        self._tokenizer: Any = None
        self.auto_theme, self.typed_early = "dark", ""
        self._stores: list[Store] = []
        self.user_keys = dict(self.settings.keys)
        self.failure = ""
        self.mouse_on = self.settings.ui.mouse if self.begin.mouse is None else self.begin.mouse
        self.leaving = False

    @property
    def surroundings(self) -> Any:
        return self.settings.environment

    # Start --------------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        for theme in OWN:
            self.register_theme(theme)
        wanted = self._theme_name(self.begin.theme or self.settings.ui.theme)
        self.theme = wanted if wanted in self.available_themes else self.auto_theme
        self.theme_changed_signal.subscribe(self, self._theme_picked)
        self.set_keymap({name: key for name, key in self.user_keys.items()})
        if self.settings.ui.reduced_motion:
            self.animation_level = "none"
        self._handle_signals()
        self.push_screen(ChatScreen())
        # Not before the first frame: another thread's imports would hold the interpreter.
        self.set_timer(WARM_UP_S, lambda: self.run_worker(partial(asyncio.to_thread, warm_up), group="warm"))
        # The engine thread and the interpreter share one lock; short turns keep keys quick while it holds it.
        sys.setswitchinterval(0.001)

    async def start_up(self, chat: ChatScreen) -> None:
        """Opens what the command line asked for, once the screen is there."""
        drawn = asyncio.Event()
        chat.call_after_refresh(drawn.set)
        await drawn.wait()
        begin = self.begin
        for problem in clashes(self.user_keys):
            chat.tell(problem, "warning")
        draft = await asyncio.to_thread(self._first_draft)
        if begin.view is not None:
            chat.keep_first_draft(draft)
            await chat.open_conversation(begin.view)
        else:
            early = chat.composer.text
            chat.clear_conversation()
            chat.restore_draft(draft, early)
            chat.composer.prompts = list(reversed(await asyncio.to_thread(self.store.prompt_history, None)))
        notices = begin.notices
        if begin.view is not None and begin.view.interrupted:
            # The conversation on screen says it itself.
            notices = tuple(text for text in notices if not (text.startswith("interrupted:") and begin.view.conversation.id in text))
        for text in [*notices, *([begin.backend_missing] if begin.backend_missing else [])]:
            chat.add_notice(text)
        chat.preload()
        for name, text in begin.attachments:
            chat.composer.insert(chat.composer.add_chip("file", text, name) + " ")
        if self.typed_early:
            chat.composer.insert(self.typed_early)
        if begin.prompt:
            chat.composer.insert(begin.prompt)
        chat.started(send=bool(begin.prompt) and begin.send)
        if begin.backend_missing and begin.view is None and not begin.pick:
            chat.action_welcome()
        if begin.pick:
            chat.action_conversations()

    def _first_draft(self) -> Any:
        """What was written where there is no conversation yet; a store that cannot be read says so where it is needed."""
        try:
            return self.store.draft(None)
        except StoreError as error:
            log.warning("the draft of a new conversation is not read: %s", error)
            return None

    def get_driver_class(self) -> type[Driver]:
        """The driver of our own where Textual would take its one for Unix terminals."""
        chosen = super().get_driver_class()
        if chosen.__module__ != "textual.drivers.linux_driver":
            return chosen
        from dsv41chat.ui.driver import TerminalDriver

        return TerminalDriver

    # Signals and the way out --------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is None:
                continue
            try:
                loop.add_signal_handler(number, self._signalled, number)
            except (NotImplementedError, RuntimeError, ValueError):
                # No main thread (tests), or a platform without such handlers.
                return
        if (number := getattr(signal, "SIGUSR1", None)) is not None:
            loop.add_signal_handler(number, self._say_status)
        if hasattr(self._driver, "gone"):
            # A hang-up reaches the process that owns the terminal, which need not be this one.
            self._driver.gone = lambda: loop.call_soon_threadsafe(self._signalled, int(getattr(signal, "SIGHUP", 1)))

    def _signalled(self, number: int) -> None:
        self.leave(128 + number)

    def _say_status(self) -> None:
        """SIGUSR1: where it stands. Standard error is the screen here, so it is said there, and kept in the log."""
        chat = next((screen for screen in self.screen_stack if isinstance(screen, ChatScreen)), None)
        if chat is not None:
            line = chat.status.line()
            log.info("status: %s", line)
            self.notify(visible_line(line), title="Status", markup=False)

    def leave(self, code: int = 0) -> None:
        """Stops a running turn, stores what is open and ends with `code`."""
        if self.leaving:
            return
        self.leaving = True
        self.controller.cancel()
        for screen in self.screen_stack:
            if isinstance(screen, ChatScreen):
                screen.stop_loading()
                screen.save_draft(now=True)
                screen.save_view()
                if screen.pump.running:
                    self.run_worker(partial(self._leave_after, screen, code), group="leave")
                    return
        self.exit(code)

    async def _leave_after(self, chat: ChatScreen, code: int) -> None:
        deadline = time.monotonic() + STOP_WAIT_S
        while chat.pump.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if chat.pump.running:
            # The engine does not answer: keep what was produced and go.
            self.controller.abort()
            await asyncio.to_thread(chat.pump.join, 1.0)
        self.exit(code)

    def action_quit_now(self) -> None:
        self.leave()

    def on_notify(self, event: Notify) -> None:
        """A new toast takes the place of its like and of the oldest, of an error last; the base class shows it after this."""
        kept = 0 if self.size.height < SHORT else 1
        new = event.notification
        same = [toast for toast in self._notifications if (toast.message, toast.severity) == (new.message, new.severity)]
        old = sorted((toast for toast in self._notifications if toast not in same), key=lambda toast: toast.severity == "error")
        for toast in [*same, *old[: max(0, len(old) - kept)]]:
            self._unnotify(toast, refresh=False)
            for holder in self.screen.query(f"#--textual-toast-{toast.identity}"):
                # Textual would take the toast out and leave its holder, an empty line.
                holder.remove()

    def not_saved(self, error: StoreError | str) -> None:
        """Something small (a draft, a view) could not be stored: said once."""
        text = str(error)
        if self.store.path is not None and self._said != text:
            self._said = text
            self.notify(visible_line(f"Not saved: {text}"), severity="error", markup=False, timeout=10)

    def use_store(self, store: Store, unsaved: str) -> None:
        """From now on everything is kept in `store`. unsaved: why that is memory only, empty when it is the disk."""
        old, self.store = self.store, store
        self.controller.store = self.host.store = store
        store.on_deleted = self.host.states.forget
        self.unsaved = unsaved
        # The caller of run_app closes the store that it opened; those that came later are closed here.
        self._stores.append(old)

    def replace_disk(self, disk: Store) -> None:
        """Ends what was opened on the disk before: it holds the locks of its conversations, and its last answer. Raises StoreError."""
        for store in self._stores:
            if store.path is not None:
                disk.succeed(store)

    def _handle_exception(self, error: Exception) -> None:
        """A bug: the terminal is restored by the base class; the traceback goes to the log, one paragraph to the user."""
        log.error("the application failed", exc_info=error)
        self.failure = f"{type(error).__name__}: {visible_line(str(error))}"
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        # Rich tracebacks would scroll the paragraph away; tests still see the exception.
        self._close_messages_no_wait()

    # Terminal -----------------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        small = not fits(event.size.width, event.size.height)
        if isinstance(self.screen, TooSmallScreen):
            if not small:
                self.pop_screen()
        elif small and len(self.screen_stack) > 1:
            self.push_screen(TooSmallScreen(next((screen for screen in self.screen_stack if isinstance(screen, ChatScreen)), None)))

    def apply_settings(self, settings: Settings) -> None:
        """From now on these count, for the screen, the turns and the engine's next load."""
        before, self.settings = self.settings.ui.theme, settings
        self.controller.settings = self.host.settings = settings
        self.animation_level = "none" if settings.ui.reduced_motion else "full"
        # The command line's stays until the setting itself changes.
        if settings.ui.theme != before:
            self.theme = self._theme_name(settings.ui.theme)

    def _theme_name(self, setting: str) -> str:
        if setting == "auto":
            return self.auto_theme
        return f"ansi-{self.auto_theme}" if setting == "ansi" else setting

    def _theme_picked(self, theme: Theme) -> None:
        """A theme chosen in the palette is kept like any other setting."""
        if theme.name in (self._theme_name(self.settings.ui.theme), self._theme_name(self.begin.theme or "auto")):
            return
        try:
            set_config(self.settings.paths.config, "ui.theme", theme.name)
        except (ConfigError, OSError) as error:
            self.not_saved(str(error))
        self.apply_settings(self.settings.changed("ui.theme", theme.name))

    def cached_states(self) -> dict[str, int]:
        """Bytes of stored states per conversation for the build that is loaded. Not on the event loop."""
        states, view = self.host.states, self.host.view
        if states.cache is None or view is None:
            return {}
        from dsv41chat.store.prompt_cache_room import listing

        try:
            return {row["conversation"]: row["bytes"] for row in listing(states.cache) if view.name in row["builds"]}
        except StoreError as error:
            log.warning("the stored states cannot be listed: %s", error)
            return {}

    def memory(self) -> tuple[int, int] | None:
        """(bytes in use by this process and on the device, bytes of the machine); None where the system does not say."""
        try:
            import resource

            page = os.sysconf("SC_PAGE_SIZE")
            total = page * os.sysconf("SC_PHYS_PAGES")
            try:
                used = int(Path("/proc/self/statm").read_text().split()[1]) * page
            except OSError:
                # The peak is all that is known there; macOS counts it in bytes.
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        except (ImportError, ValueError, OSError):
            return None
        engine, device = self.host.engine, self.host.device_memory()
        # On the CPU its arrays are part of the process.
        return used + (device[0] if device is not None and engine.device != "cpu" else 0), total

    def count_tokens(self, text: str, stopped: Callable[[], bool] = lambda: False) -> int:
        """Tokens of a text for the build that answers next, of a long one to about one in a thousand. Not on the event loop.

        In pieces, so that the screen is drawn meanwhile. Raises EngineError; Cancelled when the program leaves or `stopped` says so.
        """
        from dsv41chat.engine.chat.tokenizer import count_text

        if self._tokenizer is None:
            engine = self.host.engine
            self._tokenizer = engine.tokenizer if engine is not None else self.host.load_tokenizer(self.host.resolve(self.build))
        return count_text(self._tokenizer, text, stopped=lambda: stopped() or not self.is_running)

    def toggle_mouse(self) -> bool:
        """Gives the mouse to the terminal, or takes it back. Returns whether it is the program's now."""
        self.mouse_on = not self.mouse_on
        name = "_enable_mouse_support" if self.mouse_on else "_disable_mouse_support"
        # Textual offers no public switch at run time.
        switch = getattr(self._driver, name, None)
        if switch is not None:
            switch()
        return self.mouse_on

    def write_terminal(self, sequence: str) -> None:
        """Writes a control sequence of our own to the terminal."""
        if self._driver is not None:
            self._driver.write(sequence)

    def write_copy(self, text: str) -> Path:
        """The last resort of copying: a private file in the state folder."""
        from dsv41chat.store.files import write_private

        path = self.settings.paths.state / "copied.txt"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, text.encode("utf-8", "replace"))
        return path

    def shown_key(self, action: str) -> str:
        """The key of an action of the keymap, as the user has it."""
        return display(self.user_keys.get(action, next(key.key for key in KEYS if key.id == action)))

    # Palette ------------------------------------------------------------------------------------------------------------

    def action_command_palette(self) -> None:
        if not CommandPalette.is_open(self):
            self.push_screen(CommandPage(id="--command-palette"))

    def search_themes(self) -> None:
        self.push_screen(CommandPage(providers=[ThemeProvider], placeholder="Search for themes…"))

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        """Every action of the keymap, those without a key too, and the recent conversations by name.

        Over a page as well: it closes when an action is chosen.
        """
        chat = next((one for one in self.screen_stack if isinstance(one, ChatScreen)), None)
        if chat is None:
            return
        seen: set[tuple[str, str]] = set()
        for key in KEYS:
            if not key.action or key.id == "app.palette" or key.id.startswith("list.recent") or (key.title, key.action) in seen:
                continue
            # An action with a key in two places is one action.
            seen.add((key.title, key.action))
            bound = self.user_keys.get(key.id, key.key).split(",")[0]
            yield SystemCommand(key.title, f"{key.help}  ({display(bound)})" if bound else key.help, self._runner(chat, key.action))
        try:
            recent = self.store.list_conversations(None, RECENT)
        except StoreError:
            return
        for number, row in enumerate(recent, 1):
            bound = display(self.user_keys.get(f"list.recent{number}", f"alt+{number}"))
            title = visible_line(row.title) or "(empty)"
            yield SystemCommand(f"Open: {title}", f"Conversation {number} of the recent ones  ({bound})", self._runner(chat, f"recent({number})"))

    def _runner(self, chat: ChatScreen, action: str):
        async def run() -> None:
            while isinstance(self.screen, Page):
                self.screen.dismiss(None)
            await self.run_action(action, chat)

        return run


def warm_up() -> None:
    """Loads what the first frame does without, so that no page and no code block has to wait for it."""
    from rich.style import Style

    from dsv41chat.ui.render.markdown import highlight
    from dsv41chat.ui.render.palette import CODE_THEMES
    from dsv41chat.ui.screens import builds, conversations, export, help, search, settings  # noqa: F401

    highlight("x = 1", "python", CODE_THEMES["dark"], Style())


def run_app(controller: TurnController, start: AppStart | None = None) -> int:
    """Runs the full screen until the user leaves. Returns the exit code; the terminal is as it was before."""
    app = ChatApp(controller, start)
    if (app.begin.theme or app.settings.ui.theme) in ("auto", "ansi") and not app.surroundings.ssh and not app.surroundings.no_color:
        light, app.typed_early = ask_terminal()
        app.auto_theme = "light" if light else "dark"
    result = app.run(mouse=app.mouse_on)
    for store in [*app._stores[1:], *([app.store] if app._stores else [])]:
        store.close()
    program = app.begin.program
    if app.failure:
        print(f"{program} has failed: {app.failure}\nThe details are in {app.settings.paths.log / 'dsv41chat.log'}.", file=sys.stderr)
        result = 1
    return result if result is not None else (app.return_code or 0)
