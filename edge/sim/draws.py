"""Seeded draws: one independent stream for each name, so that whoever draws more never shifts what others draw.

A name is what the stream is for, such as ``("phone-17", "training")``. The stream depends on the seed and the name alone: not on
how many other streams there are, nor on the order in which they were made. Adding a device to a scenario changes no other device.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Name = str | int


class Draws:
    """All the randomness of one simulation, from one ``seed``."""

    __slots__ = ("_prefix", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._prefix = hashlib.sha256(f"fleetddp.sim:{seed}".encode())

    def stream(self, *names: Name) -> random.Random:
        """A stateful stream, always the same for the same seed and names. It takes about 2.5 KB: keep few a device."""
        return random.Random(self._digest(names))

    def generator(self, *names: Name) -> np.random.Generator:
        """The same for arrays: a NumPy generator (PCG64)."""
        import numpy as np

        return np.random.Generator(np.random.PCG64(self._digest(names)))

    def uniform(self, *names: Name) -> float:
        """One number in [0, 1) that is a pure function of the seed and the names: there is no stream and no order of asking."""
        return (self._digest(names) >> 203) * 2.0**-53

    def _digest(self, names: tuple[Name, ...]) -> int:
        """256 bits. Each name is written with its type and length: ("a", "b") is not ("ab",), and 1 is not "1"."""
        digest = self._prefix.copy()
        for name in names:
            text = str(name).encode()
            digest.update(b"%c%d:%s" % (b"i" if isinstance(name, int) else b"s", len(text), text))
        return int.from_bytes(digest.digest(), "big")
