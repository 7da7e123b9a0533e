"""The network is off in tests by a switch, not by discipline; `live` tests switch it on."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as jobs in the background inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_local(address: Any) -> bool:
    """Whether a socket address stays on this machine: a path, or a loopback host."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def network_off(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("live"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            real = getattr(socket.socket, name)

            def guarded(self: socket.socket, address: Any, real: Any = real) -> Any:
                if not _is_local(address):
                    raise OSError(f"the network is off in tests: tried to reach {address!r}")
                return real(self, address)

            patch.setattr(socket.socket, name, guarded)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer, made once per test session."""
    from tiny_model import make_tiny_model

    path = tmp_path_factory.mktemp("tiny_model")
    make_tiny_model(path)
    return path
