"""Full-text search: words through the index, anything else by reading.

The index knows words between spaces and punctuation, so text without them (Chinese, Japanese, Korean) and parts of words can only be
found by a scan. A scan reads newest first, in slices, and may be cancelled between them. Order is always by the time that a message was
written, so an imported old one comes after newer ones; of one time, the later to arrive comes first.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from dsv41chat.store.part import Part

PAGE = 30
PREFIX_LENGTH = 3  # a shorter beginning of a word would match nearly everything
SLICE_ROWS = 2000
EXCERPT_CHARS = 120

Place = tuple[float, int]  # created and seq of a message: where a page ended

_LAST_RUN = re.compile(r"[^\W_]*\Z")
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\uff66-\uffdc\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


@dataclass(frozen=True, slots=True)
class SearchHit:
    """excerpt: one line of the message around the first match, which is excerpt[start:end]."""

    seq: int
    message_id: str
    conversation_id: str
    title: str
    role: str
    created: float
    excerpt: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SearchPage:
    """hits: newest first. next: give it as `before` for the following page, None at the end. scanned: found by reading.

    cancelled: the scan was ended early by its caller.
    """

    hits: tuple[SearchHit, ...]
    next: Place | None
    scanned: bool
    cancelled: bool = False


def is_cjk(text: str) -> bool:
    """Whether any character belongs to a script that is written without spaces between words."""
    return _CJK.search(text) is not None


def match_query(query: str) -> str | None:
    """The index's form of `query`: every word must occur, the last one may go on. None if only a scan can answer it."""
    words = query.split()
    if not words or is_cjk(query) or not all(any(map(str.isalnum, word)) for word in words):
        return None
    quoted = ['"' + word.replace('"', '""') + '"' for word in words]
    # A space or punctuation after the last word says that it is complete.
    if len(_LAST_RUN.search(query)[0]) >= PREFIX_LENGTH:
        quoted[-1] += "*"
    return " ".join(quoted)


def folded(text: str) -> str:
    """Text for comparing: lower case, without accents. One character for one, so that places stay valid."""
    return text.lower() if text.isascii() else "".join(map(_fold, text))


def _fold(character: str) -> str:
    base = unicodedata.normalize("NFKD", character)[:1].casefold()
    return base if len(base) == 1 else character


def excerpt(text: str, words: list[str], chars: int = EXCERPT_CHARS) -> tuple[str, int, int]:
    """One line of at most `chars` characters around the first of `words` (folded) in `text`, and where the match is in it."""
    plain = folded(text)
    places = [(place, len(word)) for word in words if (place := plain.find(word)) >= 0]
    place, length = min(places, default=(0, 0))
    begin = text.rfind("\n", 0, place) + 1
    begin = max(begin, place - chars // 3)
    end = text.find("\n", place + length)
    end = min(len(text) if end < 0 else end, begin + chars)
    line = text[begin:end]
    length = min(length, end - place)
    # Line ends inside a match and tabs would break the line of a list.
    line = "".join(c if c.isprintable() else " " for c in line)
    return line, place - begin, place - begin + length


class Search(Part):
    def search(
        self,
        query: str,
        *,
        limit: int = PAGE,
        before: Place | None = None,
        conversation_id: str | None = None,
        cancel: Callable[[], bool] = lambda: False,
        on_scan: Callable[[], None] = lambda: None,
    ) -> SearchPage:
        """Messages that contain every word of `query`, newest first, of conversations that are not deleted.

        before: the `next` of the page before. conversation_id: only there. A query with CJK characters, or one that the index has no hit
        for, is answered by a scan; on_scan is called when it begins, cancel is polled during it and ends it with what it has.
        """
        if not query.strip():
            return SearchPage((), None, False)
        match = match_query(query)
        if match is not None:
            page = self._indexed(match, query, limit, before, conversation_id)
            # An empty later page is the end of an indexed search, not a reason to scan.
            if page.hits or (before is not None and self._indexed(match, query, 1, None, conversation_id).hits):
                return page
        on_scan()
        return self._scan(query, limit, before, conversation_id, cancel)

    def conversations_with(self, query: str, cancel: Callable[[], bool] = lambda: False) -> list[str]:
        """Ids of the conversations that have a message with every word of `query`, by the same rules, newest match first."""
        match = match_query(query)
        if match is not None:
            rows = self._rows(
                """
                SELECT m.conversation_id AS id FROM messages_fts f JOIN messages m ON m.seq = f.rowid
                WHERE messages_fts MATCH ? GROUP BY 1 ORDER BY max(m.created) DESC, max(m.seq) DESC
                """,
                [match],
            )
            if rows:
                return [row["id"] for row in rows]
        found: dict[str, None] = {}
        before: Place | None = None
        while True:
            page = self._scan(query, SLICE_ROWS, before, None, cancel, deleted_too=True)
            found |= dict.fromkeys(hit.conversation_id for hit in page.hits)
            before = page.next
            if before is None or page.cancelled:
                return list(found)

    def _indexed(self, match: str, query: str, limit: int, before: Place | None, conversation_id: str | None) -> SearchPage:
        time, seq = before or _LAST
        # The plus signs keep SQLite on the index by time, which ends at the limit: a row per match would be read for its time otherwise.
        rows = self._rows(
            """
            SELECT m.seq, m.id, m.conversation_id, m.role, m.text, m.created, c.title FROM (
              SELECT seq FROM messages JOIN conversations ON conversations.id = +conversation_id
              WHERE (messages.created, seq) < (:time, :seq) AND +seq IN (SELECT rowid FROM messages_fts WHERE messages_fts MATCH :match)
                AND deleted IS NULL AND (:only IS NULL OR +conversation_id = :only)
              ORDER BY messages.created DESC, seq DESC LIMIT :limit
            ) JOIN messages m USING (seq) JOIN conversations c ON c.id = m.conversation_id ORDER BY m.created DESC, m.seq DESC
            """,
            {"match": match, "time": time, "seq": seq, "only": conversation_id, "limit": limit + 1},
        )
        words = _words(query)
        hits = tuple(_hit(row, words) for row in rows[:limit])
        return SearchPage(hits, _place(hits[-1]) if len(rows) > limit else None, False)

    def _scan(
        self,
        query: str,
        limit: int,
        before: Place | None,
        conversation_id: str | None,
        cancel: Callable[[], bool],
        deleted_too: bool = False,
    ) -> SearchPage:
        words = _words(query)
        hits: list[SearchHit] = []
        place = before or _LAST
        while not cancel():
            rows = self._rows(
                """
                SELECT m.seq, m.id, m.conversation_id, m.role, m.text, m.created, c.title
                FROM messages m JOIN conversations c ON c.id = m.conversation_id
                WHERE (m.created, m.seq) < (:time, :seq) AND m.state <> 'running' AND (:deleted OR c.deleted IS NULL)
                  AND (:only IS NULL OR m.conversation_id = :only)
                ORDER BY m.created DESC, m.seq DESC LIMIT :limit
                """,
                {"time": place[0], "seq": place[1], "only": conversation_id, "deleted": deleted_too, "limit": SLICE_ROWS},
            )
            for row in rows:
                place = row["created"], row["seq"]
                plain = folded(row["text"])
                if all(word in plain for word in words):
                    if len(hits) == limit:
                        return SearchPage(tuple(hits), _place(hits[-1]), True)
                    hits.append(_hit(row, words))
            if len(rows) < SLICE_ROWS:
                return SearchPage(tuple(hits), None, True)
        return SearchPage(tuple(hits), place, True, cancelled=True)


_LAST: Place = (math.inf, 2**63 - 1)


def _place(hit: SearchHit) -> Place:
    return hit.created, hit.seq


def _words(query: str) -> list[str]:
    return [folded(word) for word in query.split()]


def _hit(row: dict, words: list[str]) -> SearchHit:
    line, start, end = excerpt(row["text"], words)
    return SearchHit(row["seq"], row["id"], row["conversation_id"], row["title"], row["role"], row["created"], line, start, end)
