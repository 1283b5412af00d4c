"""Reads Riegeli record files, the container in which XLA keeps a serialized executable.

A file is cut into blocks of 64 KiB that each open with a header of 24 bytes; between the headers runs a sequence of
chunks. A chunk has a header of 40 bytes and holds the records' sizes and then their bytes, both compressed alike
(google/riegeli, doc/riegeli_records_file_format.md). Hashes are not checked, transposed chunks are not read.
"""

import struct
from collections.abc import Iterator

from glmjax.errors import ConfigError

BLOCK = 1 << 16
BLOCK_HEADER = struct.Struct("<3Q")  # hash, distance to the chunk before, to the chunk after
CHUNK_HEADER = struct.Struct("<5Q")  # hash, size of the data, their hash, type and number of records, decoded size
# The header of a file's first block, which a signature chunk without data follows.
MAGIC = b"\x83\xafp\xd1\r\x88J?" + struct.pack("<2Q", 0, BLOCK_HEADER.size + CHUNK_HEADER.size)
CHUNK_TYPES = "smprt"  # signature, metadata, padding, records, transposed records
CODECS = {"b": "brotli", "z": "zstd", "s": "snappy"}


def find_records(data: bytes) -> Iterator[bytes]:
    """Records of the Riegeli file that begins somewhere in ``data``; none if there is no file.

    Raises:
      ConfigError: cramjam, which decompresses, is not installed, or the file is not as described above.
    """
    start = data.find(MAGIC)
    if start < 0:
        return
    blocks = (data[at : at + BLOCK] for at in range(start, len(data), BLOCK))
    chunks = b"".join(block[BLOCK_HEADER.size :] for block in blocks)
    at = 0
    while at + CHUNK_HEADER.size <= len(chunks):
        _, size, _, kind, _ = CHUNK_HEADER.unpack_from(chunks, at)
        letter, num_records = chr(kind & 0xFF), kind >> 8
        begin = at + CHUNK_HEADER.size
        if letter not in CHUNK_TYPES or begin + size > len(chunks):
            return  # beyond the end of the file
        if letter == "r":
            yield from _chunk_records(chunks[begin : begin + size], num_records)
        elif letter == "t":
            raise ConfigError("serialized executable: transposed Riegeli chunks are not supported")
        at += CHUNK_HEADER.size + max(size, num_records)


def _chunk_records(chunk: bytes, num_records: int) -> Iterator[bytes]:
    codec = chr(chunk[0])
    sizes_length, begin = varint(chunk, 1)
    sizes = _decompress(chunk[begin : begin + sizes_length], codec)
    values = _decompress(chunk[begin + sizes_length :], codec)
    at = of_sizes = 0
    for _ in range(num_records):
        size, of_sizes = varint(sizes, of_sizes)
        yield values[at : at + size]
        at += size


def _decompress(data: bytes, codec: str) -> bytes:
    if codec == "\0":
        return data
    if codec not in CODECS:
        raise ConfigError(f"serialized executable: Riegeli compression {codec!r} is not supported")
    try:
        import cramjam
    except ImportError as error:
        raise ConfigError("reading a serialized executable needs cramjam: pip install 'glmjax[aot]'") from error
    _, begin = varint(data, 0)  # the decompressed size
    module = getattr(cramjam, CODECS[codec])
    return bytes((module.decompress_raw if codec == "s" else module.decompress)(data[begin:]))


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number, low bits first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
