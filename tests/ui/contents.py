"""The kinds of text that the acceptance checks stream (spec: app, section 12, check 2)."""

from __future__ import annotations

CONTENTS = {
    "prose": "# A title\n\n"
    + "Some words of **bold** prose with `code`, *stress*, a [link](https://example.com) and a comma. " * 6
    + "\n\n> quoted\n",
    "code": "Look:\n\n```python\n"
    + "".join(f"def f{n}(x):\n    return x * {n}  # number {n}\n\n" for n in range(40))
    + "```\n\nand `that` was all.\n",
    "list": "".join(f"{n}. item {n}\n" for n in range(1, 301)) + "\nend\n",
    "table": "| name | square |\n|---|--:|\n" + "".join(f"| row {n} | {n * n} |\n" for n in range(200)) + "\nend\n",
    "cjk": "日本語のテキストは長いので折り返しが必要です。絵文字 😀 と 👩‍👩‍👧 も、é も。" * 12 + "\n\n- 一\n- 二 🎉\n",
}
