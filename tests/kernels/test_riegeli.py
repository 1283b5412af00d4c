"""The reader of Riegeli files against a small writer of the format as it is described."""

import struct

import pytest

from glmjax.errors import ConfigError
from glmjax.kernels.riegeli import BLOCK, MAGIC, find_records, varint

cramjam = pytest.importorskip("cramjam")

CODECS = {
    "\0": lambda data: data,
    "s": lambda data: bytes(cramjam.snappy.compress_raw(data)),
    "z": lambda data: bytes(cramjam.zstd.compress(data)),
    "b": lambda data: bytes(cramjam.brotli.compress(data)),
}


def to_varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def compress(data, codec):
    return data if codec == "\0" else to_varint(len(data)) + CODECS[codec](data)


def record_chunk(records, codec):
    sizes = compress(b"".join(to_varint(len(r)) for r in records), codec)
    data = codec.encode() + to_varint(len(sizes)) + sizes + compress(b"".join(records), codec)
    header = struct.pack("<5Q", 0, len(data), 0, ord("r") | len(records) << 8, sum(map(len, records)))
    return header + data + bytes(max(0, len(records) - len(header + data)))


def write(chunks):
    """Chunks behind the signature, cut into blocks with a header each."""
    stream = struct.pack("<5Q", 0, 0, 0, ord("s"), 0) + b"".join(chunks)
    file, room = bytearray(MAGIC), BLOCK - 24
    while len(stream) > room:
        file += stream[:room] + bytes(24)
        stream = stream[room:]
    return bytes(file + stream)


RECORDS = [b"one", b"", bytes(range(256)) * 4]


@pytest.mark.parametrize("codec", CODECS)
def test_records_are_read_back(codec):
    assert list(find_records(write([record_chunk(RECORDS, codec), record_chunk([b"last"], codec)]))) == [
        *RECORDS,
        b"last",
    ]


@pytest.mark.parametrize("codec", ["\0", "s"])
def test_records_go_on_over_blocks(codec):
    large = bytes(i * 7919 >> 3 & 0xFF for i in range(3 * BLOCK))
    assert list(find_records(write([record_chunk([large, b"end"], codec)]))) == [large, b"end"]


def test_file_may_stand_within_other_bytes():
    file = write([record_chunk(RECORDS, "\0")])
    assert list(find_records(b"head" * 1000 + file + b"\x80\x04 tail" * 50)) == RECORDS


def test_file_in_a_file():
    inner = write([record_chunk([b"inside"], "s")])
    (outer,) = find_records(write([record_chunk([b"before" + inner], "s")]))
    assert list(find_records(outer)) == [b"inside"]


def test_no_file_has_no_records():
    assert list(find_records(b"")) == list(find_records(b"no file here")) == []


def test_unknown_compression_is_named():
    with pytest.raises(ConfigError, match="Riegeli compression 'q' is not supported"):
        list(find_records(write([record_chunk([b"x"], "\0").replace(b"\0\x01\x01x", b"q\x01\x01x")])))


def test_transposed_chunks_are_refused():
    chunk = struct.pack("<5Q", 0, 0, 0, ord("t") | 1 << 8, 0)
    with pytest.raises(ConfigError, match="transposed"):
        list(find_records(write([chunk])))


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63])
def test_varints(value):
    assert varint(b"\xff" + to_varint(value) + b"\x01", 1) == (value, 1 + len(to_varint(value)))
