"""The CRC32C of a whole from the CRC32Cs of its parts, without a second pass over the bytes.

A CRC is affine in what came before: the CRC of A followed by B is the CRC of B, exclusive-or a linear image of the CRC of A
that depends only on the length of B. The image is applied for each power of two in that length.
"""

from __future__ import annotations

from functools import cache

import google_crc32c
import numpy as np

from fleetddp.common.files import Data


def checksum(data: Data) -> int:
    """The CRC32C of any buffer, without copying it."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def joined(first: int, second: int, size: int) -> int:
    """CRC32C of A followed by B, given that of A, that of B, and how many bytes B has."""
    power = 0
    while size:
        if size & 1:
            first = _apply(_image(power), first)
        size >>= 1
        power += 1
    return first ^ second


def _apply(image: tuple[int, ...], crc: int) -> int:
    out = 0
    for column in image:
        if crc & 1:
            out ^= column
        crc >>= 1
    return out


@cache
def _image(power: int) -> tuple[int, ...]:
    """What 2**power bytes that follow make of each of a CRC's 32 bits."""
    if power == 0:
        origin = google_crc32c.extend(0, b"\0")
        return tuple(google_crc32c.extend(1 << bit, b"\0") ^ origin for bit in range(32))
    half = _image(power - 1)
    return tuple(_apply(half, column) for column in half)
