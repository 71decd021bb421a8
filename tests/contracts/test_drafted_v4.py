"""Contract C1 on a tiny pack of V4: the tests of `test_drafted`, which say what they are about."""

from __future__ import annotations

import pytest

from tests.contracts import test_drafted
from tests.contracts.test_drafted import (
    test_a_drafter_that_raises_is_turned_off,
    test_confidences_never_move_a_token,
    test_drafted_equals_plain,
    test_random_depth_every_round,
)
from tests.drafting import Family

__all__ = [
    "test_a_drafter_that_raises_is_turned_off",
    "test_confidences_never_move_a_token",
    "test_drafted_equals_plain",
    "test_random_depth_every_round",
]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family("v4", tmp_path_factory.mktemp("pack"))


def test_nothing_is_left_out():
    assert {name for name in vars(test_drafted) if name.startswith("test_")} == set(__all__)
