"""The one checksum of kvfs: CRC32C (Castagnoli), computed by the ``crc32c`` package in hardware."""

import struct
from typing import Final

import crc32c as _crc32c

#: A checksum as it is stored.
CRC: Final = struct.Struct("<I")
#: ``crc32c(data + crc32c(data).to_bytes(4, "little"), value)`` is this constant for every *data*
#: and *value*: bytes followed by their own checksum are verified by one call, without a slice.
CRC32C_RESIDUE: Final = 0x48674BC7

#: ``crc32c(data, value=0) -> int``: the CRC32C of *data* following bytes whose CRC32C is *value*.
#: The C function itself: a Python wrapper would take longer than the checksum of a record.
crc32c = _crc32c.crc32c
