"""Tiny packs of both families for contracts of drafted decode."""

from __future__ import annotations

import pytest

from tests.drafting import Family


@pytest.fixture(scope="module", params=["v41", "v4"])
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("pack"))
