"""The checksum of what is sent and stored: crc32, as zlib has it.

zlib-ng takes a fifth of zlib's time for the same number, and is installed with zmqtrain wherever it has a release.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
