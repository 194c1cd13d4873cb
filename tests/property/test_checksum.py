"""The CRC32C of a whole from those of its parts."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.common.checksum import joined


def test_google_crc32c_is_the_compiled_one() -> None:
    # In pure Python a 40 MB update would take minutes.
    assert google_crc32c.implementation == "c"


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_is_the_checksum_of_both(first: bytes, second: bytes) -> None:
    parts = google_crc32c.value(first), google_crc32c.value(second)
    assert joined(*parts, len(second)) == google_crc32c.value(first + second)


@pytest.mark.parametrize("size", [256 * 1024, 512 * 1024, 516 * 1000, 2**20 + 1])
def test_of_chunks_as_they_are_sent(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    first, second = data[:1000], data[:size]
    assert joined(google_crc32c.value(first), google_crc32c.value(second), size) == google_crc32c.value(first + second)


def test_of_nothing() -> None:
    assert joined(0, 0, 0) == google_crc32c.value(b"")
