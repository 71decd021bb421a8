"""Import direction (house style, section 1), read twice: from the source and from fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv41chat"
GROUPS = ("engine", "store", "ui", "bench", "nano")
# Who may import whom, anywhere in a file. "top" is everything directly in dsv41chat/.
ALLOWED = {
    "engine": {"engine"},
    "store": {"store"},
    "ui": {"ui", "engine", "store", "top", "nano"},  # top: settings; nano: where the embedded pack lies
    "bench": {"bench", "engine", "store", "ui", "top", "nano"},
    "nano": {"nano", "engine"},
    "top": {"top", *GROUPS},
}
# Third-party packages that only some groups may import.
ONLY = {
    "textual": {"ui"},
    "rich": {"ui"},
    "mlx": {"engine", "bench", "nano"},
    "sqlite_utils": {"store"},
    "sqlite3": {"store"},
    "torch": {"nano"},
    "safetensors": {"engine", "nano", "bench"},
    "tokenizers": {"engine", "nano"},
}
# Modules of ui that scripted mode and commands need: they must never pull the full screen in.
PLAIN_UI = ("turn", "turn_events", "host", "engine_thread", "headless", "batch", "output", "inputs", "interrupts", "prompting", "export", "sanitize")


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Absolute module names that a file imports; inside functions and TYPE_CHECKING too unless told otherwise."""
    tree = ast.parse(path.read_text("utf-8"))
    if top_level_only:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    here = (*path.relative_to(ROOT).with_suffix("").parts[:-1],)
    names: set[str] = set()
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])]) if node.level else node.module
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def group(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "dsv41chat":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in GROUPS else "top"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def violations(path: Path) -> list[str]:
    own = group(".".join(path.relative_to(ROOT).with_suffix("").parts))
    bad = []
    for name in imports(path):
        other = group(name)
        # `from dsv41chat import __version__` reads the package itself, which imports nothing.
        if other is not None and name not in ("dsv41chat", "dsv41chat.__version__") and other not in ALLOWED[own]:
            bad.append(f"{path.relative_to(ROOT)} ({own}) imports {name}")
        root = name.split(".")[0]
        if root in ONLY and own not in ONLY[root]:
            bad.append(f"{path.relative_to(ROOT)} ({own}) imports {root}")
    return bad


def test_the_import_graph_points_one_way():
    assert [bad for path in files() for bad in violations(path)] == []


@pytest.mark.parametrize(
    ("place", "line"),
    [("store/x.py", "import mlx.core"), ("engine/x.py", "from dsv41chat.store import Store"), ("engine/ops/x.py", "from ...ui import turn"),
     ("store/x.py", "def f():\n    import textual")],
)  # fmt: skip
def test_a_planted_import_is_found(tmp_path, monkeypatch, place, line):
    path = tmp_path / "dsv41chat" / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert violations(path)


def test_only_settings_reads_the_environment():
    # The engine sets a default for MLX before MLX is loaded; it reads nothing.
    reading = re.compile(r"os\.(environ(?!\.setdefault)|getenv)")
    readers = [p.relative_to(PACKAGE).as_posix() for p in files() if reading.search(p.read_text("utf-8"))]
    assert [name for name in readers if not name.startswith(("nano/", "bench/"))] == ["settings.py"]


def test_float32_products_stay_float32():
    code = "import os; os.environ.pop('MLX_ENABLE_TF32', 0); import dsv41chat.engine.errors; print(os.environ['MLX_ENABLE_TF32'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "0"


@pytest.mark.parametrize("module", PLAIN_UI)
def test_plain_ui_modules_import_neither_textual_nor_mlx_at_their_top(module):
    names = {name.split(".")[0] for name in imports(PACKAGE / "ui" / f"{module}.py", top_level_only=True)}
    assert not names & {"textual", "mlx", "rich"}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("dsv41chat, dsv41chat.settings, dsv41chat.cli, dsv41chat.cli_options, dsv41chat.cli_commands", "mlx textual torch tokenizers"),
        ("dsv41chat.cli_conversations, dsv41chat.cli_models, dsv41chat.cli_cache, dsv41chat.cli_config", "mlx textual torch"),
        ("dsv41chat.store", "mlx textual torch dsv41chat.engine dsv41chat.ui"),
        ("dsv41chat.engine, dsv41chat.engine.errors, dsv41chat.engine.events", "mlx textual torch dsv41chat.store dsv41chat.ui"),
        (", ".join(f"dsv41chat.ui.{name}" for name in PLAIN_UI), "mlx textual torch"),
        # What the first frame has no use for is loaded behind it.
        ("dsv41chat.ui.app", "mlx torch markdown_it pygments dsv41chat.store.prompt_cache dsv41chat.ui.screens.builds"),
        ("dsv41chat.nano", "mlx textual torch"),
    ],
)
def test_a_fresh_interpreter_loads_no_more_than_it_may(modules, absent):
    code = f"import sys\nimport {modules}\nprint([m for m in {absent.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
