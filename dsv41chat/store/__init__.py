"""Conversations on disk: SQLite and files. Knows nothing of the engine or of any front end."""

from dsv41chat.store.answers import AnswerWriter
from dsv41chat.store.builds import EMBEDDED, clean_name, free_name
from dsv41chat.store.drafts import QUEUE_LIMIT
from dsv41chat.store.errors import (
    Ambiguous,
    BadName,
    Locked,
    NotFound,
    QueueFull,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreUnreadable,
)
from dsv41chat.store.locks import Holder
from dsv41chat.store.records import Build, Conversation, ConversationSummary, Draft, Message, Queued, hash_ids, pack_ids, unpack_ids
from dsv41chat.store.search import SearchHit, SearchPage
from dsv41chat.store.store import DATABASE, Store
from dsv41chat.store.titles import title_of

__all__ = [
    "DATABASE",
    "EMBEDDED",
    "QUEUE_LIMIT",
    "Ambiguous",
    "AnswerWriter",
    "BadName",
    "Build",
    "Conversation",
    "ConversationSummary",
    "Draft",
    "Holder",
    "Locked",
    "Message",
    "NotFound",
    "QueueFull",
    "Queued",
    "SearchHit",
    "SearchPage",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StoreNewer",
    "StoreReadOnly",
    "StoreUnreadable",
    "clean_name",
    "free_name",
    "hash_ids",
    "pack_ids",
    "title_of",
    "unpack_ids",
]
