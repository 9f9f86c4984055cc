"""Fields of a message as bytes, as protobuf writes them."""

from __future__ import annotations


def varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def field(number: int, data: bytes) -> bytes:
    """A field of text, of bytes, or of a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data
