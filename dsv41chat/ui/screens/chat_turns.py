"""The part of the chat screen that runs turns: send, queue, show what comes, stop, and what remains after an end."""

from __future__ import annotations

import time
from typing import Any

from textual.widgets import Static

from dsv41chat.store import QueueFull, StoreError
from dsv41chat.ui.present import clock, notice, thinking_note, update_entry
from dsv41chat.ui.render.entry import ANSWER, USER, Entry
from dsv41chat.ui.render.wrap import crop_cells
from dsv41chat.ui.sanitize import visible_line
from dsv41chat.ui.screens.chat_messages import Taken
from dsv41chat.ui.status import Status
from dsv41chat.ui.turn_events import Failed, Finished, Noticed, Piece, Ready, Saved, Started, TurnEvent, TurnRequest, Warned
from dsv41chat.ui.turn_pump import TurnPump
from dsv41chat.ui.widgets.sidebar import Sidebar

STATUS_S = 0.2
SECOND_STOP_S = 3.0
NEVER = float("-inf")
STOPPED_S = 1.0  # a key pressed twice to stop must not act on what is there once it has stopped
WAITING = "waiting"  # the notice that says what is not answered or not sent


class TurnActions:
    """Mixed into ChatScreen."""

    def init_turns(self) -> None:
        self.status = Status()
        self.pump = TurnPump(self.app.controller, self.turn_events, self.turn_ended)
        self.queue: list[Any] = []
        self._told_queue = ""
        self.held = ""
        self._queued_loading = self._sent_after = False
        self._pending: Entry | None = None
        self._answer: Entry | None = None
        self._sent = ""
        self._sent_queue_id: int | None = None
        self._continued: str | None = None  # the answer that the newest turn goes on with
        self._failure: Failed | None = None
        self.failure_line: Entry | None = None  # the newest
        self._finish: Finished | None = None
        self._stop_at, self._stopped_at, self._stopped_text = 0.0, NEVER, ""
        self._status_at = 0.0

    # Sending ------------------------------------------------------------------------------------------------------------

    def submit(self, text: str) -> None:
        """What Enter in the composer does with its text."""
        if text.startswith("/") and not text.startswith("//"):
            self.run_command(text)
            return
        if text.startswith("//"):
            text = text[1:]
        if self.readonly:
            self.tell("This conversation is read-only here; ctrl+N starts a new one.", "warning")
            return
        if self.pump.running or (self.switching and self.conversation is not None):
            self._enqueue(text)
            return
        if self.switching:
            self._hold(text)
            return
        if self.editing is not None:
            self.send_edit(text)
            return
        self.composer.remember(text)
        self.composer.reset()
        self.start(self._request(text), text)

    def _request(self, text: str, queue_id: int | None = None) -> TurnRequest:
        if self.conversation is None:
            begin = self.app.begin
            settings = {key: value for key, value in self.new_settings.items() if key != "system"}
            system = self.new_settings.get("system", begin.system)
            return TurnRequest(text=text, system=system, title=begin.title, build=self.app.build, settings=settings)
        return TurnRequest(
            self.conversation.id, text=text, parent_id=self.leaf_id, build=self.app.build, queue_id=queue_id, clear_draft=queue_id is None
        )

    def start(self, request: TurnRequest, shown: str | None = None) -> None:
        """Starts a turn. shown: the user's text, put on the screen before it is stored."""
        self._sent = shown or ""
        self._sent_queue_id = request.queue_id
        self._continued = request.continue_from
        self._failure = self._finish = None
        self._sent_after = False
        self._pending = self._answer = None
        for entry in [entry for entry in self.transcript.entries if entry.key == WAITING]:
            # It says what to do now, and that is done.
            self.transcript.drop(entry)
        self.transcript.end()
        if shown is not None:
            self._pending = Entry("pending", USER, "you", clock(time.time()), shown)
            self.transcript.append(self._pending)
        self._answer = Entry("answer", ANSWER, self._header_build or "answer", clock(time.time()))
        self._answer.running = True
        self._answer.thinking_view = self.thinking_view
        self._answer.state_note = "…"
        self.transcript.append(self._answer)
        if self.transcript.has_focus:
            # The keys go on from the message that this turn is about.
            self.transcript.selected = self.transcript.index_of(self._answer)
        self.status.begin(time.monotonic())
        if request.queue_id is not None:
            # It stands in the transcript now, and leaves the stored queue with the commit that makes it a message.
            self.show_queue([item for item in self.queue if item.id != request.queue_id])
        else:
            self.show_status()
        self.pump.start(request)
        self.show_keys()

    # Events -------------------------------------------------------------------------------------------------------------

    def turn_events(self, events: list[TurnEvent]) -> None:
        """A batch of events; one redraw for all of them."""
        now = time.monotonic()
        fed = False
        for event in events:
            self.status.apply(event, now)
            if isinstance(event, Piece):
                fed = self._feed(event) or fed
            else:
                self._event(event)
        answer = self._answer
        if answer is not None:
            if self.status.thinking and answer.message is None:
                answer.thinking_note = thinking_note(self.status.thinking, self.status.thinking_s)
            if not answer.text and not answer.thinking:
                answer.state_note = self.status.fields()[0][0] + " …" if self.status.running else ""
            elif answer.running:
                answer.state_note = ""
            self.transcript.changed(answer)
        if now - self._status_at >= STATUS_S or not self.status.running:
            self._status_at = now
            self.show_status()

    def _feed(self, piece: Piece) -> bool:
        if self._answer is not None and piece.text:
            self.taken = None
            self._answer.feed(piece.channel, piece.text)
            return True
        return False

    def _event(self, event: TurnEvent) -> None:
        if isinstance(event, Started):
            self._turn_started(event)
        elif isinstance(event, Ready):
            self._header_build = event.build.name
            if self._answer is not None:
                self._answer.label = visible_line(event.build.name)
            self.show_header()
        elif isinstance(event, Saved):
            self._saved(event.message)
        elif isinstance(event, Warned):
            self.tell(event.message, "warning")
        elif isinstance(event, Noticed):
            if event.code == "build" or not any(entry.key == "welcome" for entry in self.transcript.entries):
                self.tell(event.message)
        elif isinstance(event, Finished):
            self._finish = event
        elif isinstance(event, Failed):
            self._failure = event

    def _turn_started(self, event: Started) -> None:
        if self.conversation is None or self.conversation.id != event.conversation_id:
            self.conversation = self.app.store.conversation(event.conversation_id)
            self.new_settings = {}
        if event.build is not None:
            self._header_build = event.build.name
        self.show_header()

    def _saved(self, message: Any) -> None:
        self.taken = None
        if message.role == "user":
            if message.parent_id is None:
                self.forget_first_draft()
            self.renew_draft()
            if self._pending is not None:
                update_entry(self._pending, message)
                self._pending = None
            self.leaf_id = message.id
            if self._sent_queue_id is not None:
                self._sent_queue_id = None
                self.reload_queue()
        else:
            self.leaf_id = message.id
            if self._answer is not None:
                self._answer.finish()
                update_entry(self._answer, message)
                self._answer.thinking_note = thinking_note((message.usage or {}).get("thinking_tokens", 0), self.status.thinking_s)
                self._answer.state_note = ""

    def turn_ended(self) -> None:
        """The turn's thread has ended; its events have all been shown."""
        asked = [entry.message for entry in self.transcript.entries if entry.message is not None]  # what the turn was about
        answer, failure, finish = self._answer, self._failure, self._finish
        self.status.running = self.status.stopping = False
        if answer is not None and failure is not None and failure.answer is not None:
            # The row was stored with what had arrived.
            self._saved(failure.answer)
        taken, self.taken = self.taken, None
        if taken is not None:
            self.bring_back(taken, failed=failure is not None)
        elif answer is not None:
            answer.running = False
            answer.state_note = ""
            if answer.text or answer.thinking or answer.message is not None:
                answer.finish()
                self.transcript.changed(answer)
            else:
                self.transcript.drop(answer)
        self._answer = None
        stopped = finish is not None and finish.finish == "cancelled"
        normal = finish is not None and not stopped
        if failure is not None:
            self._show_failure(failure, taken, asked)
        elif stopped and finish.message is None:
            self._give_back()
            # What was sent behind it waits: whether it goes off before the message that is being written again is the user's to say.
            self._sent_after = False
        if stopped:
            self._stopped_at, self._stopped_text = time.monotonic(), self.composer.text
            if self.edit_label:
                self.show_label()
                self.set_timer(STOPPED_S, self.show_label)
            self.show_waiting()
        self.spawn(self.refreshed(), "refresh")
        self.show_status()
        self.show_keys()
        self.query_one(Sidebar).reload(self.conversation.id if self.conversation else None)
        if self.queue and (normal or self._sent_after):
            self.call_later(self.action_send_queued)
        elif self.queue:
            self.tell_queue()

    def _show_failure(self, failure: Failed, taken: Taken | None, asked: list[Any]) -> None:
        full = failure.code == "context_full"
        # Its remedy on the command line is no remedy here: the dialog offers those of the screen.
        hint = "" if full else failure.hint
        text, back = visible_line(failure.message) + (f"\n→ {visible_line(hint)}" if hint else ""), False
        if self._pending is not None:
            # Nothing was stored: the text returns to where it was written.
            self.transcript.drop(self._pending)
            self._pending = None
            if self._sent_queue_id is None:
                back = True
                self.composer.put_before(self._sent)
                if taken is not None and taken.edited is not None:
                    self.begin_edit(taken.edited, keep_text=True)
            else:
                self.reload_queue()
            if taken is None:
                self.show_waiting()
        elif full or taken is None or taken.retried:
            text += "\nThe message is saved." if full else "\nctrl+R tries again."
        if failure.code == "store":
            self.continue_in_memory(failure, back)
            return
        self.failure_line = notice(text, error=True)
        self.transcript.append(self.failure_line)
        if full:
            self.spawn(self.ask_context(asked), "context")

    def _give_back(self) -> None:
        """No token came: the prompt returns to the composer, before what was typed since; sent again changed, it becomes a sibling."""
        if not self._sent:
            return
        self.composer.put_before(self._sent)
        last = next((entry for entry in reversed(self.transcript.entries) if entry.role == USER and entry.message), None)
        if last is not None and last.text == self._sent:
            self.begin_edit(last, keep_text=True)

    # Stop ---------------------------------------------------------------------------------------------------------------

    def stop_turn(self) -> None:
        now = time.monotonic()
        if self.status.stopping and now - self._stop_at < SECOND_STOP_S:
            self.tell("Stopping: the current chunk must finish first.")
        self._stop_at = now
        self.status.stopping = True
        self.pump.cancel()
        self.show_status()

    def just_stopped(self) -> bool:
        """Whether a turn was stopped a moment ago and nothing was written since: another Esc or ctrl+C was meant for it."""
        if self.composer.text != self._stopped_text:
            self._stopped_at = NEVER
        return time.monotonic() - self._stopped_at < STOPPED_S

    # Queue --------------------------------------------------------------------------------------------------------------

    def _hold(self, text: str) -> None:
        """The first message of a new conversation, written while the build is loading."""
        if self.held:
            self.tell("The first message waits for the build already.", "warning")
            return
        self.held = text
        self.composer.remember(text)
        self.composer.reset()
        # A draft until it is sent: it must survive whatever ends the program now.
        self.save_draft()
        self.show_queue([])

    def _enqueue(self, text: str) -> None:
        if self.conversation is None:
            self.tell("The first message is still being stored; try again in a moment.", "warning")
            return
        try:
            self.app.store.queue_push(self.conversation.id, text)
        except QueueFull as error:
            self.tell(str(error), "warning")
            return
        except StoreError as error:
            self.tell(str(error), "error")
            return
        self._queued_loading = self._queued_loading or self.switching
        # The answer is whole on the screen, or was told to stop; only its turn is not over yet.
        self._sent_after = self._sent_after or self._finish is not None or (self.status.stopping and not self.queue)
        self.composer.remember(text)
        self.composer.reset()
        self.reload_queue()

    def reload_queue(self) -> None:
        try:
            self.show_queue(self.app.store.queued(self.conversation.id) if self.conversation else [])
        except StoreError as error:
            self.tell(str(error), "error")

    def show_queue(self, queue: list[Any]) -> None:
        other = [item.id for item in queue] != [item.id for item in self.queue]
        self.queue = list(queue)
        if other:
            # What was said about the queue is over, or of another conversation.
            self.untell(self._told_queue)
            if self._answer is None:
                self.show_waiting()
        texts = [self.held] if self.held else [item.text for item in self.queue]
        self.status.queued = len(texts)
        self.composer.queued = len(self.queue)
        line = self.query_one("#queue", Static)
        width = max(10, self.size.width - 12)
        line.update("\n".join(f"queued {n}: {crop_cells(visible_line(text), width)}" for n, text in enumerate(texts, 1)))
        line.display = bool(texts)
        self.show_status()

    def tell_queue(self) -> None:
        self._told_queue = f'{len(self.queue)} queued: send them? Palette: "Send queued messages", or up-arrow takes one back.'
        self.tell(self._told_queue)

    def recall_queued(self) -> None:
        """Up in an empty composer takes the newest waiting message back."""
        if self.conversation is None:
            return
        try:
            draft = self.app.store.queue_take_last(self.conversation.id)
        except StoreError as error:
            self.tell(str(error), "error")
            return
        if draft is not None:
            self.composer.reset(draft.text)
        self.reload_queue()

    def on_remove_queued(self) -> None:
        """Del in an empty composer drops the newest waiting message."""
        if not self.queue:
            return
        try:
            self.app.store.queue_remove(self.queue[-1].id)
        except StoreError as error:
            self.tell(str(error), "error")
        self.reload_queue()

    def action_send_queued(self) -> None:
        if not self.queue:
            self.tell("Nothing is queued.")
        elif self.pump.running:
            self.tell("The queue is sent when the answer ends.")
        elif self.switching:
            self._queued_loading = True
            self.tell("The queue is sent when the build is loaded.")
        elif not self._may_run():
            return
        else:
            first = self.queue[0]
            self.start(self._request(first.text, first.id), first.text)

    def send_waiting(self) -> None:
        """The build is there: what was written meanwhile is sent. What an earlier run of the program left waits for its user."""
        meanwhile, self._queued_loading = self._queued_loading, False
        if self.held:
            text, self.held = self.held, ""
            self.show_queue(self.queue)
            self.start(self._request(text), text)
        elif self.queue and meanwhile and not self.pump.running:
            self.action_send_queued()

    def action_clear_queue(self) -> None:
        try:
            for item in self.queue:
                self.app.store.queue_remove(item.id)
        except StoreError as error:
            self.tell(str(error), "error")
        self.reload_queue()
