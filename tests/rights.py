"""File modes that bind: the superuser, as whom tests may run, is given the rights of an ordinary owner for a while."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1 << 1, 1 << 2


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Inside, this thread and those that it starts may read and write only what modes allow the files' owner.

    Skips the test where the superuser cannot give that up for a while (systems without Linux capabilities).
    """
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root cannot give up its rights for a while here")
    before = _capabilities()
    _set_capabilities([word & ~(_DAC_OVERRIDE | _DAC_READ_SEARCH) if i == 0 else word for i, word in enumerate(before)])
    try:
        yield
    finally:
        _set_capabilities(before)


def _capabilities() -> list[int]:
    """Of this thread: effective, permitted and inheritable, low words first."""
    data = (ctypes.c_uint32 * 6)()
    _call("capget", data)
    return list(data)


def _set_capabilities(words: list[int]) -> None:
    _call("capset", (ctypes.c_uint32 * 6)(*words))


def _call(name: str, data: ctypes.Array) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)((ctypes.c_uint32 * 2)(_VERSION_3, 0), data):
        raise OSError(ctypes.get_errno(), f"{name} failed")
