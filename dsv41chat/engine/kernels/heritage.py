"""What was recorded for a lane outlives it: the next lane of the same shapes takes it over, and the memory with it.

To record a step costs as much as several steps take, and it is recorded for the memory of one lane. A conversation that is closed, and the
lane on which costs were measured, leave theirs behind, and the next conversation copies its rows there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Heritage(Generic[T]):
    """Values of owners that are gone, at most `most` bytes of them, the newest ones."""

    def __init__(self, most: int):
        self._most = most
        self._left: list[tuple[T, int]] = []

    def will(self, owner: object, value: T, nbytes: int) -> Callable[[], object]:
        """The value is left when the owner is gone, or when what this returns is called. nbytes: that it holds; 0: it is not left."""
        made = weakref.finalize(owner, self._leave, value, nbytes)
        made.atexit = False
        return made

    def _leave(self, value: T, nbytes: int) -> None:
        if not nbytes:
            return
        self._left.append((value, nbytes))
        while sum(size for _, size in self._left) > self._most:
            self._left.pop(0)

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """The newest that fits, which is the caller's alone then."""
        for i in reversed(range(len(self._left))):
            if fits(self._left[i][0]):
                return self._left.pop(i)[0]
        return None
