"""Settings: every value with where it came from. The only module that reads the environment.

    built-in default < the pack's generation_config.json < config file < environment < the conversation's own < command line

`load_settings` merges what is known at start into one frozen `Settings`. What depends on a conversation or on a build (the
second and the fifth layer) is added by `Settings.turn_options`. The table `KEYS` is the single list of what can be set: the
file, the environment, `config show|init|set` and the settings screen are all read from it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv41chat.ui.turn_events import BuildView, TurnOptions

APP = "dsv41chat"
PREFIX = "DSV41CHAT_"
EFFORTS = ("off", "low", "high", "max")
# `engine.kernels.routes.known_routes()` and the devices that they are for, which cannot be asked where no back end is installed.
ROUTE_DEVICES = {"blas": ("cpu",), "metal": ("metal",), "cuda": ("cuda",), "compiled": ("cpu", "cuda", "metal")}
ROUTES = ("auto", "stock", *ROUTE_DEVICES)
# auto, `ui.themes.OWN` and the terminal's own sixteen colours: ansi-dark or ansi-light, whichever its background asks for.
OWN_THEMES = ("auto", "dark", "light", "high-contrast", "ansi")
# Textual's that need no look into it, which takes a fifth of a second; what else there is `ui.themes.names` knows.
KNOWN_THEMES = (
    "atom-one-dark", "atom-one-light", "catppuccin-frappe", "catppuccin-latte", "catppuccin-macchiato", "catppuccin-mocha", "dracula", "flexoki",
    "gruvbox", "monokai", "nord", "rose-pine", "rose-pine-dawn", "rose-pine-moon", "solarized-dark", "solarized-light", "textual-dark",
    "textual-light", "tokyo-night",
)  # fmt: skip


class ConfigError(Exception):
    """A value in the config file or the environment that cannot be used. Exit code 3."""

    code = "config"

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Key:
    """One setting. kind: str, bool, int, float, list, size or dir; choices: the only texts allowed; auto: "auto" is allowed too.

    low, high: inclusive bounds of a number; positive: above `low`, not at it. inert: this version reads it and does nothing.
    """

    name: str
    kind: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    auto: bool = False
    low: float | None = None
    high: float | None = None
    positive: bool = False
    inert: bool = False

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        return self.name.partition(".")[2]

    @property
    def variable(self) -> str:
        """The environment variable of this key."""
        return PREFIX + self.name.replace(".", "_").upper()

    def expected(self) -> str:
        """What a value must be, in words."""
        words = {
            "str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number", "list": "a list of texts",
            "size": 'a size such as "8 GB"', "dir": "a folder", "draft": "auto, off or a depth from 0 to 64",
        }  # fmt: skip
        if self.choices:
            return "one of " + ", ".join(self.choices)
        text = words[self.kind]
        if self.low is not None and self.high is not None:
            text += f" {'above' if self.positive else 'from'} {self.low:g} to {self.high:g}"
        elif self.low is not None:
            text += f" {'above' if self.positive else 'of at least'} {self.low:g}"
        return text + (' or "auto"' if self.auto else "")


def _key(name: str, default: Any, doc: str, kind: str | None = None, **options: Any) -> Key:
    kind = kind or {bool: "bool", int: "int", float: "float", list: "list", tuple: "list"}.get(type(default), "str")
    return Key(name, kind, default, doc, **options)


_TABLE = (
    _key("chat.system", "", "system prompt of new conversations"),
    _key("chat.effort", "high", "thinking effort of new conversations", choices=EFFORTS),
    _key("chat.keep_reasoning", False, "show the model its earlier thoughts in later turns"),
    _key("chat.v4_effort", "auto", "which effort texts a V4 build gets", choices=("auto", "official", "preview")),
    _key("chat.temperature", 1.0, "0 = greedy", low=0),
    _key("chat.top_k", 0, "sample from the k likeliest tokens; 0 = all", low=0),
    _key("chat.top_p", 1.0, "sample from the likeliest tokens that hold this probability", low=0, high=1, positive=True),
    _key("chat.min_p", 0.0, "drop tokens below this share of the likeliest one", low=0, high=1),
    _key("chat.presence_penalty", 0.0, "taken from the logit of every token that was generated already", low=-100, high=100),
    _key("chat.frequency_penalty", 0.0, "the same, times how often it was generated", low=-100, high=100),
    _key("chat.max_tokens", "auto", "limit of thinking and answer; auto: 8,192, thinking 65,536, effort max 131,072", "int", auto=True, low=1),
    _key("chat.loop_stop", True, "end an answer that repeats itself"),
    _key("chat.keep_deleted_days", 30, "deleted conversations can be restored so long", low=0),
    _key("engine.model", "", "build to use; empty: the last used one, else the embedded one"),
    _key("engine.model_dirs", (), "every sub-folder with a config.json is listed as a build"),
    _key("engine.context", "auto", "tokens of context; auto: the largest that memory admits", "int", auto=True, low=1),
    _key("engine.draft", "auto", "drafting: auto, off or a fixed depth", "draft"),
    _key("engine.exact", "on", "on: drafted text equals plain text; fast: it may differ at near-ties", choices=("on", "fast")),
    _key("engine.engram", "auto", "where the tables live", choices=("auto", "resident", "stream")),
    _key("engine.cache_quant", True, "round cache and index rows as the V4.1 release does"),
    _key("engine.linear_input_fp8", False, "V4.1: round the inputs of linear layers as the release does"),
    _key("engine.qat_sim", False, "V4: round as its release does"),
    _key("engine.routes", "auto", "what computes; stock: MLX's own operations alone; see doctor routes", choices=ROUTES),
    _key("engine.memory_margin", "auto", "memory kept free beside a build", "size", auto=True),
    _key("engram.scales", "auto", "the tables' scales: copied into memory or mapped", choices=("auto", "resident", "mapped")),
    _key("engram.access", "auto", "how table files are read; pread also survives a file that is cut", choices=("auto", "mmap", "pread")),
    _key("engram.path", "auto", "the one way to read rows, for diagnosis", choices=("auto", "direct", "advise", "pool", "nocache")),
    _key("engram.cache_budget", "auto", "table bytes that one request may push into the page cache", "size", auto=True),
    _key("engram.row_cache", "auto", "table rows kept in memory where the page cache is passed by; 0 = none", "int", auto=True, low=0),
    _key("cache.enabled", True, "keep computed states of conversations"),
    _key("cache.dir", "", "folder of computed states; empty: prompt_cache in the user cache folder", "dir"),
    _key("cache.budget", "auto", "bytes that stored states may take; 0 = off", "size", auto=True),
    _key("cache.strict", False, "resume only where every device repeats a fresh run bit for bit"),
    _key("cache.min_tokens", "auto", "shortest state that is stored", "int", auto=True, low=1),
    _key("ui.theme", "auto", "auto, dark, light, high-contrast, ansi or a Textual theme"),
    _key("ui.mouse", True, "false: the terminal keeps its own selection"),
    _key("ui.sidebar", "auto", "conversation list at the left", choices=("auto", "show", "hide")),
    _key("ui.thinking", "fold", "how thinking is shown", choices=("fold", "show", "hide")),
    _key("ui.math", "unicode", "how formulas are shown", choices=("unicode", "source")),
    _key("ui.wrap_code", False, "wrap long lines of code"),
    _key("ui.confirm_quit", True, "ask before quitting while an answer runs"),
    _key("ui.reduced_motion", False, "no spinner, no smooth scroll"),
    _key("ui.burst_paste", True, "treat bursts of keys as a paste"),
    _key("log.level", "info", "how much is logged", choices=("error", "warning", "info", "debug")),
    _key("log.content", False, "with level debug: message text may be logged"),
)  # fmt: skip
KEYS: Mapping[str, Key] = MappingProxyType({key.name: key for key in _TABLE})
SECTIONS = (*dict.fromkeys(key.section for key in _TABLE), "keys")

# Keys of a turn, by their place in the table; what a conversation or a pack may set is among them.
TURN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        name: f"chat.{name}"
        for name in (
            "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "max_tokens", "effort", "loop_stop",
            "keep_reasoning", "v4_effort",
        )
    }
    | {"draft": "engine.draft"}
)  # fmt: skip
CONVERSATION_KEYS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "effort", "draft",
)  # fmt: skip


def _section_class(section: str) -> type:
    keys = [key for key in _TABLE if key.section == section]
    return make_dataclass(section.title() + "Settings", [(key.field, Any, key.default) for key in keys], frozen=True)


_CLASSES = {section: _section_class(section) for section in SECTIONS if section != "keys"}


@dataclass(frozen=True)
class Paths:
    """Where the program keeps its files. config: the TOML file (may not exist); the others are folders, made on first use.

    states: of the prompt cache.
    """

    config: Path
    data: Path
    cache: Path
    states: Path
    state: Path
    log: Path


@dataclass(frozen=True)
class Environment:
    """What the terminal and the user's shell say. interactive programs as words, None when unset.

    colors: how many the terminal claims to show, in words.
    ssh, tmux, wayland, display: whether the session runs over SSH, in tmux, and which desktop's clipboard it can reach.
    """

    no_color: bool = False
    colors: str = ""
    term: str = ""
    ssh: bool = False
    tmux: bool = False
    wayland: bool = False
    display: bool = False
    visual: str | None = None
    editor: str | None = None
    pager: str | None = None


@dataclass(frozen=True)
class Settings:
    """One attribute per section of the config file, each a frozen record of its keys: `settings.chat.effort`.

    keys: the user's keymap. turn: what the command line fixes for every turn (names of TurnOptions). layers: the values of
    the file, the environment and the command line apart, by origin and key. warnings: sentences to show once.
    """

    chat: Any
    engine: Any
    engram: Any
    cache: Any
    ui: Any
    log: Any
    keys: Mapping[str, str]
    paths: Paths
    environment: Environment = Environment()
    turn: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """The value of a key of the table, such as "chat.effort"."""
        key = KEYS[name]
        return getattr(getattr(self, key.section), key.field)

    def origin(self, name: str) -> str:
        """default, file, env or flag."""
        return next((origin for origin in ("flag", "env", "file") if name in self.layers.get(origin, {})), "default")

    def place(self, name: str) -> str:
        """Where the value of `name` was written: the file with its line, or the variable; "" for a default or an option."""
        origin = self.origin(name)
        if origin == "env":
            return KEYS[name].variable
        if origin != "file":
            return ""
        try:
            text = self.paths.config.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        return _of(self.paths.config, _at(text, KEYS[name].section, KEYS[name].field)).rstrip(": ")

    def remedy(self, name: str) -> str:
        """The command that takes a value which cannot be used away from where it was written."""
        return f"unset {KEYS[name].variable}" if self.origin(name) == "env" else unset_words(self.paths.config, name)

    def turn_options(self, conversation: Any = None, build: BuildView | None = None) -> TurnOptions:
        """The options of a turn, from all six layers.

        conversation: a store record; its settings hold its own values and, under "origin", the defaults of the build that it
        was created on, which count only while that build answers. None: a new conversation on `build`.
        """
        from dsv41chat.ui.turn_events import TurnOptions

        values = {name: value for name, (value, _) in self.turn_values(conversation, build).items()}
        if values["max_tokens"] == "auto":
            values["max_tokens"] = None
        names = {f.name for f in fields(TurnOptions)}
        return TurnOptions(**{name: value for name, value in values.items() if name in names})

    def turn_values(self, conversation: Any = None, build: BuildView | None = None) -> dict[str, tuple[Any, str]]:
        """Every option of a turn as (value, origin). origin: default, build, file, env, conversation or flag."""
        values = {name: (KEYS[key].default, "default") for name, key in TURN_KEYS.items()}
        own = dict(conversation.settings or {}) if conversation is not None else {}
        origin = own.get("origin") or ({"name": build.name, "defaults": dict(build.defaults)} if build is not None else {})
        if origin and (build is None or build.name == origin.get("name")):
            values |= {name: (value, "build") for name, value in _checked(origin.get("defaults") or {}).items()}
        for layer in ("file", "env"):
            values |= {name: (self.layers[layer][key], layer) for name, key in TURN_KEYS.items() if key in self.layers.get(layer, {})}
        # What a conversation began with outlives a change of the settings; its source is still what it was.
        for name, value in _checked({"effort": origin.get("effort")}).items():
            values[name] = (value, str(origin.get("effort_from", "conversation")))
        values |= {name: (own[name], "conversation") for name in CONVERSATION_KEYS if own.get(name) is not None}
        values |= {name: (self.layers["flag"][key], "flag") for name, key in TURN_KEYS.items() if key in self.layers.get("flag", {})}
        return values | {name: (value, "flag") for name, value in self.turn.items()}

    def changed(self, name: str, value: Any) -> Settings:
        """A copy in which the config file sets `name` (typed) and nothing later overrides it; value None: back to the default."""
        layers = {origin: {key: held for key, held in layer.items() if key != name} for origin, layer in self.layers.items()}
        if value is not None:
            layers["file"] = layers.get("file", {}) | {name: value}
        key = KEYS[name]
        section = replace(getattr(self, key.section), **{key.field: key.default if value is None else value})
        frozen = MappingProxyType({origin: MappingProxyType(layer) for origin, layer in layers.items()})
        return replace(self, **{key.section: section}, layers=frozen)

    def released(self, name: str) -> Settings:
        """A copy in which the command line no longer fixes the turn option `name`: the user has chosen anew."""
        key = TURN_KEYS.get(name, "")
        layers = dict(self.layers) | {"flag": MappingProxyType({k: v for k, v in self.layers.get("flag", {}).items() if k != key})}
        turn = MappingProxyType({k: v for k, v in self.turn.items() if k != name})
        return replace(self, layers=MappingProxyType(layers), turn=turn)


def _checked(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The pack defaults that are usable; a pack with a strange value must not keep the program from starting."""
    values = {}
    for name, value in defaults.items():
        try:
            values[name] = coerce(KEYS[TURN_KEYS[name]], value)
        except (KeyError, ValueError):
            continue
    return values


# values ------------------------------------------------------------------------------------------------------------------


def coerce(key: Key, value: Any) -> Any:
    """`value` (as TOML gives it) as the type of `key`. Raises ValueError that says what is expected."""
    kind = key.kind
    if key.auto and value == "auto":
        return "auto"
    if kind == "draft":
        if value in ("auto", "off") or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 64):
            return value
        raise ValueError(key.expected())
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool) and _inside(key, value):
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and _inside(key, value):
        return float(value)
    if kind in ("str", "dir") and isinstance(value, str) and (not key.choices or value in key.choices):
        return value
    if kind == "list" and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind == "size" and (isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)):
        return value if isinstance(value, int) else parse_size(value)
    raise ValueError(key.expected())


def _inside(key: Key, value: float) -> bool:
    if key.low is not None and (value < key.low or (key.positive and value == key.low)):
        return False
    return key.high is None or value <= key.high


def parse_size(text: str) -> int:
    """Bytes of "512 MB", "8GiB", "1073741824". K, M, G, T are powers of 1,000; with "i" of 1,024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError('a size such as "8 GB"')
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(unit.upper()) if unit else 0))


def parse_text(key: Key, text: str) -> Any:
    """A value written as plain text (environment, `config set`) as the type of `key`. Raises ValueError."""
    kind = key.kind
    if kind == "bool":
        if text.lower() in ("1", "true"):
            return True
        if text.lower() in ("0", "false"):
            return False
        raise ValueError("1, 0, true or false")
    if kind == "list":
        return tuple(part for part in text.split(os.pathsep) if part)
    if kind in ("int", "float", "draft") and text not in ("auto", "off"):
        try:
            return coerce(key, float(text) if kind == "float" else int(text))
        except ValueError:
            raise ValueError(key.expected()) from None
    return coerce(key, text)


def near_words(word: str, known: Any) -> list[str]:
    """At most two of `known` that `word` may have meant, the nearest first."""
    return difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)


def near(word: str, known: Any) -> str:
    """ " (did you mean a or b?)" or nothing."""
    return did_you_mean(near_words(word, known))


def near_keys(name: str) -> list[str]:
    """At most two keys that `name` may have meant. A section that they share makes no two of them alike."""
    section, _, field = name.rpartition(".")
    for keys, word, cutoff in (
        ({key.field: name for name, key in KEYS.items() if key.section == section}, field, 0.65),
        ({key.field: name for name, key in KEYS.items()}, field, 0.75),
        ({name: name for name in KEYS}, name, 0.8),
    ):
        if found := difflib.get_close_matches(word, list(keys), n=2, cutoff=cutoff):
            return [keys[one] for one in found]
    return []


def did_you_mean(words: list[str]) -> str:
    return f" (did you mean {' or '.join(words)}?)" if words else ""


# layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What is wrong with `name` (a key, or a section) in a config file. text: a clause with the line; fatal: its value cannot be used.

    drawn: only what draws minds; other runs do not speak of it, unless something else is fatal.
    """

    name: str
    text: str
    fatal: bool
    drawn: bool = False


def scan_config(text: str, path: Path) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """(values by key, keymap, problems) of a config file's text; what cannot be used is left out. Raises ConfigError where it is no TOML."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", hint=f"an editor on {path}") from error
    values: dict[str, Any] = {}
    keymap: dict[str, str] = {}
    problems: list[Problem] = []
    for section, table in data.items():
        if section not in SECTIONS:
            problems.append(Problem(section, f"unknown section [{section}]{near(section, SECTIONS)}", False))
            continue
        if not isinstance(table, dict):
            problems.append(Problem(section, f"{_at(text, '', section)}{section} must be a section", True))
            continue
        for name, value in table.items():
            full, at = f"{section}.{name}", _at(text, section, name)
            if section == "keys":
                if isinstance(value, str):
                    keymap[name] = value
                else:
                    problems.append(Problem(full, f'{at}keys."{name}" must be a text, not {_shown(value)}', True))
            elif full not in KEYS:
                problems.append(Problem(full, f"{at}unknown key {full}{did_you_mean(near_keys(full))}", False))
            else:
                try:
                    values[full] = coerce(KEYS[full], value)
                except ValueError as error:
                    problems.append(Problem(full, f"{at}{full} must be {error}, not {_shown(value)}", True))
                    continue
                if full == "ui.theme" and (why := theme_problem(value)):
                    problems.append(Problem(full, f"{at}{why}", False, drawn=True))
    return values, keymap, problems


def theme_problem(name: str) -> str:
    """What is wrong with a value of ui.theme, in a clause; "" for a theme. Looks into Textual for a name that nobody is sure to know."""
    if name in OWN_THEMES + KNOWN_THEMES:
        return ""
    from dsv41chat.ui.themes import names

    return "" if name in names() else f"ui.theme names no theme: {name!r}{near(name, names())}"


def check_theme(settings: Settings) -> None:
    """Raises ConfigError, with its place, where `ui.theme` is set to what is no theme."""
    if why := theme_problem(settings.ui.theme):
        raise ConfigError(f"{settings.place('ui.theme')}: {why}.", hint=settings.remedy("ui.theme"))


def read_config(text: str, path: Path) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """(values by key, keymap, warnings) of a config file's text. Raises ConfigError with every wrong key and its line."""
    values, keymap, problems = scan_config(text, path)
    if any(problem.fatal for problem in problems):
        words, editor = [unset_words(path, problem.name) for problem in problems], f"an editor on {path}"
        hint = "; ".join(words) if len(words) <= 2 else f"{words[0]}, and so on, or {editor}"
        # A whole section is not taken out by a command.
        hint = hint if all("." in problem.name for problem in problems) else editor
        raise ConfigError(f"{_of(path, '; '.join(problem.text for problem in problems))}.", hint=hint)
    return values, keymap, [f"{_of(path, problem.text)}." for problem in problems if not problem.drawn]


def unset_words(path: Path, name: str) -> str:
    """The command that takes `name` out of a config file."""
    return f"{APP} config unset {name}" + ("" if path == config_path() else f" --config {shlex.quote(str(path))}")


def _of(path: Path, clause: str) -> str:
    """A clause about a file, which may begin with the line."""
    return f"{path}, {clause}" if clause.startswith("line ") else f"{path}: {clause}"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _at(text: str, section: str, name: str) -> str:
    """ "line 12: " of a key in a TOML text; nothing if it stands in a form that is not looked for."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_.-]+)\s*\]", line)
        if header:
            current = header[1]
            continue
        match = re.match(r"""\s*["']?([A-Za-z0-9_.-]+?)["']?\s*=""", line)
        if match and (match[1] == name if current == section else not current and match[1] == f"{section}.{name}"):
            return f"line {number}: "
    return ""


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """(values by key, warnings) of the DSV41CHAT_* variables. Raises ConfigError."""
    variables = {key.variable: key for key in _TABLE}
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in (PREFIX + "CONFIG", PREFIX + "DATA_DIR"):
            continue
        key = variables.get(name)
        if key is None:
            section, _, field = name.removeprefix(PREFIX).lower().partition("_")
            meant = near_keys(f"{section}.{field}" if section in SECTIONS or field else section)
            warnings.append(f"unknown environment variable {name}{did_you_mean([KEYS[one].variable for one in meant])}.")
            continue
        try:
            values[key.name] = parse_text(key, environ[name])
        except ValueError as error:
            raise ConfigError(f"{name} must be {error}, not {environ[name]!r}.", hint=f"unset {name}") from None
    return values, warnings


def load_settings(
    *,
    config: str | Path | None = None,
    data_dir: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    turn: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge defaults, config file, environment and command line.

    config, data_dir, flags (values by key, already typed), turn (TurnOptions names): from the command line.
    environ: for tests; the process environment otherwise. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    named = config or environ.get(PREFIX + "CONFIG") or None
    path = config_path(config, environ)
    warnings: list[str] = []
    file_values: dict[str, Any] = {}
    keymap: dict[str, str] = {}
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if named:
            raise ConfigError(f"{path}: there is no such config file.", hint="dsv41chat config init") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    else:
        file_values, keymap, warnings = read_config(text, path)
    env_values, env_warnings = read_environment(environ)
    layers = {"file": file_values, "env": env_values, "flag": dict(flags or {})}
    merged = {key.name: key.default for key in _TABLE} | file_values | env_values | layers["flag"]
    warnings += env_warnings
    idle = [name for name in sorted({**file_values, **env_values}) if KEYS[name].inert and merged[name] != KEYS[name].default]
    warnings += [f"{name} has no effect in this version." for name in idle]
    sections = {section: cls(**{key.field: merged[key.name] for key in _TABLE if key.section == section}) for section, cls in _CLASSES.items()}
    return Settings(
        **sections,
        keys=MappingProxyType(keymap),
        paths=_paths(path, data_dir or environ.get(PREFIX + "DATA_DIR") or None, merged["cache.dir"]),
        environment=Environment(
            no_color=bool(environ.get("NO_COLOR")), colors=_colors(environ), term=environ.get("TERM", ""), visual=environ.get("VISUAL") or None,
            editor=environ.get("EDITOR") or None, pager=environ.get("PAGER") or None,
            ssh=bool(environ.get("SSH_CONNECTION") or environ.get("SSH_TTY")), tmux=bool(environ.get("TMUX")),
            wayland=bool(environ.get("WAYLAND_DISPLAY")), display=bool(environ.get("DISPLAY")),
        ),
        turn=MappingProxyType(dict(turn or {})),
        layers=MappingProxyType({name: MappingProxyType(layer) for name, layer in layers.items()}),
        warnings=tuple(warnings),
    )  # fmt: skip


def _colors(environ: Mapping[str, str]) -> str:
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "16 million (COLORTERM)"
    return "256" if "256color" in environ.get("TERM", "") else "16"


def config_path(config: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """Where the config file is, whether it exists or not."""
    named = config or (os.environ if environ is None else environ).get(PREFIX + "CONFIG") or None
    return Path(named).expanduser() if named else _user_folders()["config"] / "config.toml"


def state_folder(data_dir: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The user's state folder, without reading the config file. data_dir: what --data-dir says."""
    environ = os.environ if environ is None else environ
    return _paths(config_path(None, environ), data_dir or environ.get(PREFIX + "DATA_DIR") or None, "").state


def _user_folders() -> dict[str, Path]:
    import platformdirs

    dirs = platformdirs.PlatformDirs(APP, appauthor=False)
    return {
        "config": dirs.user_config_path, "data": dirs.user_data_path, "cache": dirs.user_cache_path, "state": dirs.user_state_path,
        "log": dirs.user_log_path,
    }  # fmt: skip


def _paths(config: Path, data_dir: str | Path | None, cache_dir: str) -> Paths:
    if data_dir:
        data = Path(data_dir).expanduser().absolute()
        folders = {"data": data, "cache": data / "cache", "state": data / "state", "log": data / "log"}
    else:
        folders = {name: path for name, path in _user_folders().items() if name != "config"}
    folders["states"] = Path(cache_dir).expanduser().absolute() if cache_dir else folders["cache"] / "prompt_cache"
    return Paths(config=config, **folders)
