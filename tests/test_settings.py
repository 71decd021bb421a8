"""Settings: layers and their order, types, near matches, places, and what a turn gets from them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsv41chat.config_file import init_config, problems, set_config, template, toml, unset_config
from dsv41chat.settings import KEYS, ConfigError, coerce, load_settings, parse_size, parse_text, read_config
from dsv41chat.ui.turn_events import TurnOptions


def load(tmp_path, text: str = "", environ: dict | None = None, **options):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_settings(config=path, environ=environ or {}, **options)


def test_order_of_file_environment_and_command_line(tmp_path):
    text = "[chat]\ntemperature = 0.1\ntop_p = 0.2\ntop_k = 3\n"
    s = load(tmp_path, text, {"DSV41CHAT_CHAT_TOP_P": "0.4", "DSV41CHAT_CHAT_TOP_K": "5"}, flags={"chat.top_k": 7})
    assert (s.chat.temperature, s.chat.top_p, s.chat.top_k, s.chat.min_p) == (0.1, 0.4, 7, 0.0)
    assert [s.origin(f"chat.{name}") for name in ("temperature", "top_p", "top_k", "min_p")] == ["file", "env", "flag", "default"]


def build(name="nano", **defaults):
    return SimpleNamespace(name=name, defaults=defaults)


def test_pack_defaults_stand_below_the_file_and_only_for_the_build_of_the_conversation(tmp_path):
    s = load(tmp_path, "[chat]\ntop_k = 3\n")
    nano = build(temperature=0, max_tokens=512, effort="off", top_k=9)
    fresh = s.turn_options(None, nano)
    assert (fresh.temperature, fresh.max_tokens, fresh.effort, fresh.top_k) == (0.0, 512, "off", 3)
    born_here = SimpleNamespace(settings={"origin": {"name": "nano", "defaults": nano.defaults}})
    assert s.turn_options(born_here, nano).max_tokens == 512
    assert s.turn_options(born_here, build("V4.1-Flash")).max_tokens is None
    assert s.turn_options(None, build(temperature="warm", effort=3)) == s.turn_options(None, None), "a strange pack value is ignored"


def test_conversation_stands_between_environment_and_command_line(tmp_path):
    own = SimpleNamespace(settings={"effort": "low", "temperature": 0.3, "seed": 4, "loop_stop": False})
    s = load(tmp_path, "", {"DSV41CHAT_CHAT_EFFORT": "max"}, flags={"chat.temperature": 0.9}, turn={"stop": ("x",)})
    o = s.turn_options(own, None)
    assert (o.effort, o.temperature, o.seed, o.stop) == ("low", 0.9, 4, ("x",))
    assert o.loop_stop is True, "only sampling, effort and limits are the conversation's"


@pytest.mark.parametrize(("effort", "limit"), [("off", 8192), ("low", 65536), ("high", 65536), ("max", 131072)])
def test_token_limits(effort, limit):
    assert TurnOptions(effort=effort).token_limit() == limit
    assert TurnOptions(effort=effort, max_tokens=5).token_limit() == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[chat]\n\ntemperature = "hot"', ["line 3", "chat.temperature", "a number of at least 0", '"hot"']),
        ("[chat]\ntemperature = -1", ["line 2", "chat.temperature"]),
        ("[chat]\ntop_p = 0", ["above 0"]),
        ("[chat]\neffort = 'most'", ["one of off, low, high, max"]),
        ("[chat]\nloop_stop = 1", ["true or false"]),
        ("[chat]\ntop_k = 1.5", ["a whole number"]),
        ("[engine]\nmodel_dirs = 'x'", ["a list of texts"]),
        ("[engine]\ncontext = true", ["a whole number", '"auto"']),
        ("[cache]\nbudget = 'much'", ["a size"]),
        ("[keys]\n'chat.send' = 3", ["line 2", 'keys."chat.send"']),
        ("chat.effort = 7", ["line 1", "chat.effort"]),
        ("chat = 3", ["must be a section"]),
        ("[chat", ["not valid TOML"]),
    ],
)
def test_wrong_types_name_the_key_and_the_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    for word in said:
        assert word in str(error.value)


def test_unknown_names_are_warnings_with_near_matches(tmp_path):
    s = load(tmp_path, "[chat]\nefort = 'low'\n[chatt]\nx = 1\n", {"DSV41CHAT_CHAT_EFORT": "low"})
    assert len(s.warnings) == 3 and all("did you mean" in warning for warning in s.warnings)
    assert s.chat.effort == "high"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ui.mous", "ui.mouse"),
        ("ui.temperature", "chat.temperature"),
        ("efort", "chat.effort"),
        ("chta.loop_stpo", "chat.loop_stop"),
        ("ui.bogus", ""),
    ],
)
def test_only_what_is_near_is_suggested(tmp_path, name, meant):
    """That the section is the same makes no two keys alike."""
    with pytest.raises(ConfigError) as error:
        set_config(tmp_path / "config.toml", name, "1")
    assert str(error.value) == f"Unknown key {name}{f' (did you mean {meant}?)' if meant else ''}."
    variable = "DSV41CHAT_" + name.replace(".", "_").upper()
    (said,) = load(tmp_path, "", {variable: "1"}).warnings
    wanted = f" (did you mean {KEYS[meant].variable}?)" if meant else ""
    assert said == f"unknown environment variable {variable}{wanted}."


def test_the_remedy_of_two_wrong_lines_names_both(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "[ui]\nbogus = 1\n[chat]\ntemperature = 'hot'\n")
    path = tmp_path / "config.toml"
    assert "line 2: unknown key ui.bogus; line 4: chat.temperature must be" in str(error.value)
    ways = [f"dsv41chat config unset {name} --config {path}" for name in ("ui.bogus", "chat.temperature")]
    assert error.value.hint == "; ".join(ways)


def test_a_value_without_effect_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv41chat.settings.KEYS", {**KEYS, "ui.math": replace(KEYS["ui.math"], inert=True)})
    assert load(tmp_path, "[ui]\nmath = 'source'\n").warnings == ("ui.math has no effect in this version.",)
    assert load(tmp_path, "[ui]\nmath = 'unicode'\n").warnings == ()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("chat.loop_stop", "0", False), ("chat.loop_stop", "TRUE", True), ("engine.context", "auto", "auto"), ("engine.context", "4096", 4096),
        ("engine.draft", "3", 3), ("engine.draft", "off", "off"), ("cache.budget", "2GiB", 2 << 30), ("engine.model_dirs", "/a:/b", ("/a", "/b")),
        ("chat.temperature", "1", 1.0),
    ],
)  # fmt: skip
def test_values_from_the_environment(tmp_path, name, text, value):
    s = load(tmp_path, "", {KEYS[name].variable: text})
    assert s.get(name) == value and s.origin(name) == "env"


@pytest.mark.parametrize(("name", "text"), [("chat.loop_stop", "yes"), ("chat.top_k", "x"), ("chat.temperature", "nan"), ("engine.draft", "-1")])
def test_bad_values_in_the_environment(tmp_path, name, text):
    with pytest.raises(ConfigError, match=KEYS[name].variable):
        load(tmp_path, "", {KEYS[name].variable: text})


@pytest.mark.parametrize(("text", "count"), [("5", 5), ("1.5 kB", 1500), ("8 GB", 8 * 10**9), ("8GiB", 8 << 30), ("2m", 2_000_000)])
def test_sizes(text, count):
    assert parse_size(text) == count


def test_places(tmp_path, own_folders):
    s = load_settings(environ={})
    for folder in (s.paths.data, s.paths.cache, s.paths.state, s.paths.log, s.paths.config):
        assert own_folders in folder.parents and "dsv41chat" in folder.parts
    moved = load_settings(data_dir=tmp_path, environ={})
    assert (moved.paths.data, moved.paths.cache, moved.paths.state, moved.paths.log) == (
        tmp_path, tmp_path / "cache", tmp_path / "state", tmp_path / "log",
    )  # fmt: skip
    assert load_settings(environ={"DSV41CHAT_DATA_DIR": str(tmp_path)}).paths.data == tmp_path
    assert moved.paths.states == tmp_path / "cache" / "prompt_cache"
    named = load(tmp_path, f"[cache]\ndir = {toml(str(tmp_path / 'c'))}", data_dir=tmp_path).paths
    assert (named.states, named.cache) == (tmp_path / "c", tmp_path / "cache")


def test_a_named_config_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_settings(config=tmp_path / "none", environ={})
    with pytest.raises(ConfigError):
        load_settings(environ={"DSV41CHAT_CONFIG": str(tmp_path / "none")})


def test_the_shell_environment(tmp_path):
    e = load(tmp_path, "", {"NO_COLOR": "1", "EDITOR": "ed", "PAGER": "", "TERM": "dumb"}).environment
    assert (e.no_color, e.editor, e.visual, e.pager, e.term) == (True, "ed", None, None, "dumb")


def test_every_default_is_valid_and_documented():
    for key in KEYS.values():
        assert coerce(key, list(key.default) if isinstance(key.default, tuple) else key.default) == key.default
        assert key.doc and key.expected()
        if not isinstance(key.default, tuple):
            assert parse_text(key, str(key.default).lower() if isinstance(key.default, bool) else str(key.default)) == key.default


def test_init_writes_a_file_that_masks_nothing(tmp_path):
    path = tmp_path / "sub" / "config.toml"
    init_config(path)
    s = load_settings(config=path, environ={})
    assert s.layers["file"] == {} and not s.warnings and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        init_config(path)
    uncommented = "\n".join(line.removeprefix("# ") for line in template().splitlines()[2:])
    values, _, warnings = read_config(uncommented, path)
    assert set(values) == set(KEYS) and not warnings


def test_set_keeps_comments_and_everything_else(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('# mine\n[chat]\neffort = "high"  # as at work\ntop_k = 3\n\n[ui]\ntheme = "dark"\n')
    set_config(path, "chat.effort", "low")
    assert path.read_text() == '# mine\n[chat]\neffort = "low"  # as at work\ntop_k = 3\n\n[ui]\ntheme = "dark"\n'
    set_config(path, "chat.top_p", "0.5")
    set_config(path, "log.level", "debug")
    set_config(path, "keys.chat.send", 'ctrl+"x"')
    set_config(path, "engine.model_dirs", "/one:/two")
    set_config(path, "engine.model_dirs", "/three")
    s = load_settings(config=path, environ={})
    assert (s.chat.effort, s.chat.top_k, s.chat.top_p, s.ui.theme, s.log.level) == ("low", 3, 0.5, "dark", "debug")
    assert s.engine.model_dirs == ("/three",) and s.keys == {"chat.send": 'ctrl+"x"'}
    assert path.read_text().startswith("# mine\n[chat]\n")


def test_set_replaces_a_list_over_several_lines(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[engine]\nmodel_dirs = [\n  "/a",  # old\n  "/b",\n]\ndraft = "off"\n')
    set_config(path, "engine.model_dirs", "/c")
    assert path.read_text() == '[engine]\nmodel_dirs = ["/c"]\ndraft = "off"\n'


def test_set_follows_a_commented_line_and_dotted_keys(tmp_path):
    path = tmp_path / "config.toml"
    init_config(path)
    before = path.read_text().splitlines()
    set_config(path, "chat.effort", "off")
    after = path.read_text().splitlines()
    assert [line for line in after if line not in before] == ['effort = "off"']
    path.write_text('chat.effort = "low"\n')
    set_config(path, "chat.effort", "max")
    assert path.read_text() == 'chat.effort = "max"\n'


@pytest.mark.parametrize(("name", "value"), [("chat.efort", "low"), ("chat.effort", "most"), ("nothing", "1"), ("keys.", "x")])
def test_set_refuses(tmp_path, name, value):
    with pytest.raises(ConfigError):
        set_config(tmp_path / "config.toml", name, value)
    assert not (tmp_path / "config.toml").exists()


def test_set_refuses_a_form_that_it_cannot_edit(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('chat = { effort = "low" }\n')
    with pytest.raises(ConfigError, match="by hand"):
        set_config(path, "chat.effort", "high")
    assert path.read_text() == 'chat = { effort = "low" }\n'


WRONG = '# mine\n[chat]\ntemperature = "hot"  # why\nnosuch = 1\ntop_k = 3\n[ui]\nburst_paste = 3\n[keys]\n"chat.new" = 9\n'


def test_every_wrong_line_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, WRONG)
    said = str(error.value)
    clauses = ("config.toml", "line 3: chat.temperature", "line 4: unknown key chat.nosuch", "line 7: ui.burst_paste")
    assert [said.count(text) for text in clauses] == [1] * 4
    assert 'line 9: keys."chat.new" must be a text' in said and error.value.hint.startswith("dsv41chat config unset chat.temperature --config ")


def test_set_and_unset_mend_a_wrong_value_and_leave_the_others(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(WRONG)
    set_config(path, "chat.temperature", "0.5")
    assert path.read_text() == WRONG.replace('"hot"', "0.5")
    assert [text.split(":")[0] for text in problems(path)] == ["line 4", "line 7", "line 9"]
    set_config(path, "chat.effort", "low")
    for name in ("ui.burst_paste", "chat.nosuch", "keys.chat.new"):
        assert unset_config(path, name) and not unset_config(path, "ui.theme")
    assert path.read_text() == '# mine\n[chat]\ntemperature = 0.5  # why\ntop_k = 3\neffort = "low"\n' and not problems(path)
    with pytest.raises(ConfigError, match="Unknown key chat.nosuch"):
        unset_config(path, "chat.nosuch")


@pytest.mark.parametrize("change", [lambda path: set_config(path, "chat.temperature", "0.5"), lambda path: unset_config(path, "chat.temperature")])
def test_a_value_without_its_quotes_is_mended_too(tmp_path, change):
    """It makes the whole file unreadable; without that one line it is readable."""
    path = tmp_path / "config.toml"
    path.write_text("[chat]\ntemperature = hot\ntop_k = 3\n")
    change(path)
    assert path.read_text() in ("[chat]\ntemperature = 0.5\ntop_k = 3\n", "[chat]\ntop_k = 3\n")
    assert load_settings(config=path, environ={}).chat.top_k == 3
    path.write_text("[chat]\ntemperature = hot\ntop_k = three\n")
    with pytest.raises(ConfigError, match="not valid TOML: .*line 2") as error:
        change(path)
    assert error.value.hint == f"an editor on {path}"
    assert path.read_text() == "[chat]\ntemperature = hot\ntop_k = three\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[chat]\ntop_k = 3\n", ""),
        ("# mine\n\n[chat]\ntop_k = 3\n", "# mine\n"),
        ("[ui]\ntheme = 'dark'\n\n[ chat ]\n\ntop_k = 3\n\n[log]\nlevel = 'info'\n", "[ui]\ntheme = 'dark'\n\n[log]\nlevel = 'info'\n"),
        ("[chat]\n# why\ntop_k = 3\n", "[chat]\n# why\n"),
        ("[chat]  # mine\ntop_k = 3\n", "[chat]  # mine\n"),
        ("[chat]\ntop_k = 3\nmin_p = 0.1\n", "[chat]\nmin_p = 0.1\n"),
        ("chat.top_k = 3\n[ui]\n", "[ui]\n"),
        ("[ui]\n[chat]\ntop_k = 3\n", "[ui]\n"),
    ],
)
def test_the_header_of_an_empty_section_goes_with_its_last_line(tmp_path, before, after):
    """Only that of the key's own section; comments stay, and with them the header that they stand under."""
    path = tmp_path / "config.toml"
    path.write_text(before)
    assert unset_config(path, "chat.top_k")
    assert path.read_text() == after


def test_what_looks_like_a_header_in_a_text_stays(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('chat.top_k = 3\nchat.system = """\n[chat]\n\n[ui]\n"""\n')
    assert unset_config(path, "chat.top_k")
    assert path.read_text() == 'chat.system = """\n[chat]\n\n[ui]\n"""\n'


def test_a_line_inside_a_text_is_not_taken_for_a_key(tmp_path):
    path = tmp_path / "config.toml"
    text = '[chat]\nsystem = """\ntemperature = 1\n"""\ntop_k = "x"\n'
    path.write_text(text)
    for change in (lambda: set_config(path, "chat.temperature", "0.5"), lambda: unset_config(path, "chat.temperature")):
        with pytest.raises(ConfigError, match="by hand"):
            change()
        assert path.read_text() == text


def test_a_file_that_is_no_text_is_said_so_and_left_alone(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"[ui]\ntheme = '\xff\xfe'\n")
    with pytest.raises(ConfigError, match="config.toml cannot be read: .*utf-8"):
        set_config(path, "ui.theme", "light")
    assert path.read_bytes() == b"[ui]\ntheme = '\xff\xfe'\n"
