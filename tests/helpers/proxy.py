"""A TCP proxy that misbehaves as networks do: it cuts connections after so many bytes, or falls silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Proxy:
    """Forwards connections to ``target`` (a port on loopback).

    Each new connection takes the next of ``budgets``, (bytes up, bytes down); when either is spent it is cut, or carries nothing
    more that way if ``silent``. None: no end.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.budgets: deque[tuple[int | None, int | None]] = deque()
        self.silent = False
        self.connections = 0
        self._frozen: set[socket.socket] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def freeze(self) -> None:
        """From now on the connections there are carry nothing, without breaking; later ones work."""
        self._frozen.update(s for pair in self._pairs for s in pair)

    def close(self) -> None:
        """Cut everything."""
        _cut(self._listener)
        self._threads[0].join()  # now there are no further pairs
        for pair in self._pairs:
            _cut(*pair)
        for thread in self._threads[1:]:
            thread.join()
        for one in (self._listener, *(s for pair in self._pairs for s in pair)):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                child, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                parent = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                child.close()
                continue
            up, down = self.budgets.popleft() if self.budgets else (None, None)
            self._pairs.append((child, parent))
            self.connections += 1
            self._start(self._forward, child, parent, up)
            self._start(self._forward, parent, child, down)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _forward(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source in self._frozen:
                    continue
                if budget is not None:
                    data = data[:budget]
                    budget -= len(data)
                sink.sendall(data)
                if budget == 0 and not self.silent:
                    break
                if budget == 0:
                    self._frozen.add(source)
        _cut(source, sink)


def _cut(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
