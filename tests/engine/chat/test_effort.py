"""Effort levels of both families, and which texts a V4 pack was trained with."""

from __future__ import annotations

import pytest

from dsv41chat.engine.chat.effort import BadEffort, detect_v4_profile, effort_text, parse_effort
from tests.engine.chat.golden import load

TABLE = 'EFFORT = {"low": "", "high": "A", "max": "B"}\n'
CONSTANT = 'REASONING_EFFORT_MAX = "A"\n'


@pytest.mark.parametrize(
    ("value", "family", "expected"),
    [
        ("off", "v4", (False, "high")),
        ("none", "v41", (False, "high")),
        (None, "v41", (True, "high")),
        (" High ", "v4", (True, "high")),
        ("minimal", "v4", (True, "low")),
        ("medium", "v41", (True, "high")),
        ("xhigh", "v41", (True, "xhigh")),
        ("33", "v41", (True, 33)),
        (100, "v41", (True, 100)),
    ],
)
def test_parse_effort(value, family, expected):
    assert parse_effort(value, family) == expected


@pytest.mark.parametrize(
    ("value", "family"),
    [("huge", "v41"), ("", "v4"), ("0", "v41"), (101, "v41"), (50, "v4"), ("-5", "v41"), ("5.5", "v41"), (True, "v41"), ("٣", "v41")],
)
def test_unknown_efforts(value, family):
    with pytest.raises(BadEffort):
        parse_effort(value, family)


def test_preview_profile():
    texts = load("constants")["effort_v4"]
    assert [effort_text("v4", level, "preview") for level in ("low", "high", "xhigh", "max")] == ["", "", "", texts["preview"]["max"]]
    assert effort_text("v4", "high") == texts["official"]["high"] == texts["preview"]["max"]
    with pytest.raises(BadEffort):
        effort_text("v4", "high", "other")


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("DeepSeek-V4-Flash", {}, "preview"),
        ("DeepSeek-V4-Flash-0731", {}, "official"),
        ("deepseek-v4-pro-4bit", {}, "official"),
        ("prototype-v4", {}, "preview"),
        ("DeepSeek-V4-Pro", {"encoding/encoding_dsv4.py": CONSTANT}, "preview"),
        ("DeepSeek-V4-Flash", {"encoding/encoding_dsv4.py": TABLE}, "official"),
        ("DeepSeek-V4-Flash", {"encoding_dsv4.py": CONSTANT + TABLE}, "official"),
        ("DeepSeek-V4-Flash", {"a.py": CONSTANT, "b.py": TABLE}, "official"),
        ("DeepSeek-V4-Flash-0731", {"encoding/x.py": "print(REASONING_EFFORT_MAX)\n"}, "official"),
        ("DeepSeek-V4-Flash-0731", {"x.py": "not python at all ("}, "official"),
        ("DeepSeek-V4-Flash-0731", {"x.py": "\0"}, "official"),
    ],
)
def test_detection(tmp_path, name, files, expected):
    pack = tmp_path / name
    for file, text in files.items():
        (pack / file).parent.mkdir(parents=True, exist_ok=True)
        (pack / file).write_text(text)
    pack.mkdir(exist_ok=True)
    assert detect_v4_profile(pack) == expected
    assert detect_v4_profile(pack, name="V4-Pro") == ("official" if not files else expected)


def test_encoder_source_is_never_run(tmp_path):
    (tmp_path / "encoding.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{TABLE}")
    assert detect_v4_profile(tmp_path) == "official"
    assert not (tmp_path / "ran").exists()
