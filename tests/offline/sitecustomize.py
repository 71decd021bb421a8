"""No network: in this process every attempt to reach another machine, or to listen for one, raises.

The interpreter imports this file at its start wherever its folder is on PYTHONPATH, so the tests and every Python program that they
start run behind it. An audit hook sees what any library does through Python's sockets, and nothing can take it away again.
"""

from __future__ import annotations

import socket
import sys

_REFUSED = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"}
_LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}
_NETWORK = {socket.AF_INET, socket.AF_INET6}


class NetworkRefused(BaseException):
    """Not an Exception: a program must not be able to take it for a machine that happens to be offline."""


def refuse(event: str, arguments: tuple) -> None:
    """The audit hook. Local sockets of the same machine (AF_UNIX) are no network."""
    if event in _LOOKUPS or event in _REFUSED and arguments[0].family in _NETWORK:
        raise NetworkRefused(f"{event} {arguments[1:] if event in _REFUSED else arguments}")


if not getattr(sys, "_network_refused", False):
    # The hook of an interpreter is for good, and this file may be loaded twice (at the start and by a test).
    sys._network_refused = True
    sys.addaudithook(refuse)
