"""Lanes of the kernel tests are as small as they can be: the shim's player copies all of one at every step."""

from __future__ import annotations

import pytest

from dsv41chat.engine import lane


@pytest.fixture(scope="module", autouse=True)
def small_lanes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "_FIRST_ROOM", 64)
        yield
