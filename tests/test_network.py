"""The suite runs without a network: what the refusal refuses, here and in the programs that tests start."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.offline.sitecustomize import NetworkRefused


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_no_socket_connects_or_listens(family, host):
    with socket.socket(family) as stream, pytest.raises(NetworkRefused, match="connect"):
        stream.connect((host, 9))
    with socket.socket(family) as stream, pytest.raises(NetworkRefused, match="bind"):
        stream.bind((host, 0))
    with socket.socket(family, socket.SOCK_DGRAM) as datagram, pytest.raises(NetworkRefused, match="sendto"):
        datagram.sendto(b"x", (host, 9))


def test_no_name_is_looked_up():
    with pytest.raises(NetworkRefused, match="getaddrinfo"):
        urllib.request.urlopen("http://localhost:9/")


def test_a_program_that_a_test_starts_has_none_either():
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "NetworkRefused" in done.stderr
