"""TensorBoard's event files: TFRecord frames around `Event` messages of Protocol Buffers.

Only the few fields that scalars and texts need are encoded, so neither TensorFlow nor the `tensorboard`
package is needed to write them. The field numbers are those of `event.proto`, `summary.proto` and
`tensor.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_VARINT = 0
_DOUBLE = 1
_BYTES = 2
_FLOAT = 5
_DT_STRING = 7
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, with its bits reversed


def scalar_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Encode one event with a value per tag. TensorBoard stores scalars as float32."""
    values = b"".join(_bytes(1, _text(1, tag) + _float(2, value)) for tag, value in scalars.items())
    return _event(wall_time, step, _bytes(5, values))


def text_event(wall_time: float, step: int, tag: str, text: str) -> bytes:
    """Encode one event that the text plugin shows as Markdown."""
    shape = _bytes(2, _integer(1, 1))  # one dimension of size 1
    tensor = _integer(1, _DT_STRING) + _bytes(2, shape) + _text(8, text)
    metadata = _bytes(1, _text(1, "text"))
    value = _text(1, tag) + _bytes(8, tensor) + _bytes(9, metadata)
    return _event(wall_time, step, _bytes(5, _bytes(1, value)))


def version_event(wall_time: float) -> bytes:
    """Encode the event with which every file begins."""
    return _event(wall_time, 0, _text(3, "brain.Event:2"))


def record(message: bytes) -> bytes:
    """Frame a message as TFRecord files do: length, its checksum, the message, its checksum."""
    length = struct.pack("<Q", len(message))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), message, struct.pack("<I", masked_crc(message)))
    )


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C, rotated and shifted so that files that contain checksums have other checksums."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    table = _TABLE
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", wall_time) + _integer(2, step) + content


def _key(field: int, kind: int) -> bytes:
    return bytes((field << 3 | kind,))  # one byte is enough for fields below 16


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers are stored as their complement
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _key(field, _FLOAT) + struct.pack("<f", value)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", errors="replace"))
