"""Chunks packed and unpacked by hand, so that half a megabyte is copied once where protobuf would copy it four times.

A chunk is field 2 of ``PushRequest``, ``ShareRequest``, ``PullReply``, ``ProxyReply`` and ``ItemsReply``. ``pack`` writes the
very bytes protobuf writes (fields in order, zeros left out); ``unpack`` reads that form, and leaves any other that the format
allows to protobuf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, Union

from google.protobuf.message import Message

from fleetddp.common.checksum import checksum
from fleetddp.common.files import Data
from fleetddp.common.transport import limits
from fleetddp.protos import fleet_pb2 as pb
from fleetddp.protos.fleet_pb2_grpc import FleetStub

M = TypeVar("M", bound=Message)

SERVICE = pb.DESCRIPTOR.services_by_name["Fleet"].full_name

# Tags: field number << 3 | wire type (0 varint, 2 length-delimited, 5 four bytes).
_CHUNK, _OFFSET, _CRC32C, _DATA = 0x12, 0x08, 0x15, 0x1A


class ChunkBytes(NamedTuple):
    """A chunk as it came: its place in the payload, the CRC32C its sender found, its bytes (within the message's memory)."""

    offset: int
    crc32c: int
    data: memoryview


def pack(offset: int, data: Data) -> bytes:
    """A message that holds payload bytes at ``offset``, and their CRC32C."""
    crc32c = checksum(data)
    head = bytearray()
    if offset:
        head.append(_OFFSET)
        head += _varint(offset)
    if crc32c:
        head.append(_CRC32C)
        head += crc32c.to_bytes(4, "little")
    head.append(_DATA)
    head += _varint(len(data))
    return b"".join((bytes((_CHUNK,)), _varint(len(head) + len(data)), head, data))


def serialize(message: Union[Message, bytes]) -> bytes:
    """To the wire: what ``pack`` made goes as it is."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def deserializer(kind: type[M]) -> Callable[[bytes], Union[M, ChunkBytes]]:
    """From the wire: a chunk as ``ChunkBytes``, any other message of this kind (``PushRequest``, ``PullReply``, ...) as it is."""

    def deserialize(data: bytes) -> Union[M, ChunkBytes]:
        chunk = _unpack(data)
        if chunk is not None:
            return chunk
        message = kind()
        message.ParseFromString(data)
        if not message.HasField("chunk"):
            return message
        parsed: Any = message.chunk  # type: ignore[attr-defined]
        return ChunkBytes(parsed.offset, parsed.crc32c, memoryview(parsed.data))

    return deserialize


def checked(chunk: ChunkBytes) -> ChunkBytes:
    """Hold a chunk to the limits; who knows what is due compares offset and checksum."""
    limits.size(len(chunk.data), "chunk.data", limits.CHUNK_BYTES)
    limits.integer(chunk.offset, "chunk.offset")
    return chunk


def stub(channel: Any) -> Any:
    """A ``FleetStub`` whose ``Push`` and ``Share`` take packed chunks too, and whose pulls give chunks as ``ChunkBytes``."""
    made: Any = FleetStub(channel)  # type: ignore[no-untyped-call]
    made.Push = channel.stream_stream(f"/{SERVICE}/Push", serialize, pb.PushReply.FromString)
    made.Pull = channel.unary_stream(f"/{SERVICE}/Pull", pb.PullRequest.SerializeToString, deserializer(pb.PullReply))
    made.PullProxy = channel.unary_stream(f"/{SERVICE}/PullProxy", pb.ProxyRequest.SerializeToString, deserializer(pb.ProxyReply))
    made.PullItems = channel.unary_stream(f"/{SERVICE}/PullItems", pb.ItemsRequest.SerializeToString, deserializer(pb.ItemsReply))
    made.Share = channel.stream_stream(f"/{SERVICE}/Share", serialize, pb.ShareReply.FromString)
    return made


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, index after it); IndexError where there is none in its shortest form."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift and not byte:
                raise IndexError("not the shortest form")
            return value, at
        shift += 7


def _unpack(data: bytes) -> ChunkBytes | None:
    """A chunk in the form that ``pack`` writes; None for anything else."""
    if not data or data[0] != _CHUNK:
        return None
    try:
        size, at = _read_varint(data, 1)
        if at + size != len(data):
            return None
        offset = crc32c = 0
        if data[at] == _OFFSET:
            offset, at = _read_varint(data, at + 1)
        if data[at] == _CRC32C:
            crc32c = int.from_bytes(data[at + 1 : at + 5], "little")
            at += 5
        if data[at] != _DATA:
            return None
        size, at = _read_varint(data, at + 1)
    except IndexError:
        return None
    if at + size != len(data) or offset >= 2**64:
        return None
    return ChunkBytes(offset, crc32c, memoryview(data)[at:])
