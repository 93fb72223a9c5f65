"""Compression of moments against a slow twin of the format, on memory whose neighbours must not be touched."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake import _native

ISAS = _native.available_isas()
POOLS = {num_threads: _native.ThreadPool(num_threads) for num_threads in (1, 3)}
GROUP, SEGMENT, PAGE = 64, 8192, 4096
WORDS = {4: np.uint32, 2: np.uint16}
ROTATED, RAW = 1 << 31, 1 << 30

EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
EVERY_SIZE = pytest.mark.parametrize("word_bytes", WORDS)


# The twin


def compressed_group(tops: np.ndarray, low: bytes) -> bytes:
    if not tops.any() and not any(low):
        return bytes([0, 255])
    base = int(tops.min())
    width = int(tops.max() - base).bit_length()
    bits = (tops - base)[None, :] >> np.arange(width, dtype=np.uint8)[:, None] & 1
    return bytes([base, width]) + np.packbits(bits, axis=1, bitorder="little").tobytes() + low


def compressed_segment(words: np.ndarray) -> tuple[int, bytes]:
    top_bit = 8 * words.itemsize - 1
    rotated = bool((words >> top_bit).any())
    view = words << 1 | words >> top_bit if rotated else words
    groups = view.view(np.uint8).reshape(-1, GROUP, words.itemsize)
    data = b"".join(compressed_group(group[:, -1], group[:, :-1].tobytes()) for group in groups)
    if len(data) >= words.nbytes:
        return words.nbytes | RAW, words.tobytes()
    return len(data) | rotated * ROTATED, data


def compressed(words: np.ndarray) -> bytes | None:
    """What the words are compressed to; None when that is not less."""
    entries, parts = zip(
        *(compressed_segment(words[i : i + SEGMENT]) for i in range(0, words.size, SEGMENT)), strict=True
    )
    table = struct.pack(f"<{len(entries)}I", *entries)
    data = b"".join(parts)
    num_bytes = -(-(len(data) + len(table)) // PAGE) * PAGE
    return data + bytes(num_bytes - len(data) - len(table)) + table if num_bytes < words.nbytes else None


def decompressed_groups(data: bytes, num_groups: int, word_bytes: int) -> np.ndarray:
    groups = np.zeros((num_groups, GROUP, word_bytes), np.uint8)
    at = 0
    for group in groups:
        base, width = data[at : at + 2]
        at += 2
        if width == 255:
            continue
        planes = np.frombuffer(data, np.uint8, 8 * width, at).reshape(width, 8)
        bits = np.unpackbits(planes, axis=1, bitorder="little")
        group[:, -1] = base + (bits << np.arange(width, dtype=np.uint8)[:, None]).sum(axis=0, dtype=np.uint8)
        at += 8 * width
        group[:, :-1] = np.frombuffer(data, np.uint8, GROUP * (word_bytes - 1), at).reshape(GROUP, -1)
        at += GROUP * (word_bytes - 1)
    assert at == len(data)
    return groups.view(WORDS[word_bytes]).ravel()


def decompressed(data: bytes, num_words: int, word_bytes: int) -> np.ndarray:
    num_segments = -(-num_words // SEGMENT)
    table = struct.unpack(f"<{num_segments}I", data[-4 * num_segments :])
    at, parts = 0, []
    for i, entry in enumerate(table):
        part = data[at : at + entry % RAW]
        at += entry % RAW
        if entry & RAW:
            parts.append(np.frombuffer(part, WORDS[word_bytes]))
            continue
        words = decompressed_groups(part, min(SEGMENT, num_words - i * SEGMENT) // GROUP, word_bytes)
        parts.append(words >> 1 | words << (8 * word_bytes - 1) if entry & ROTATED else words)
    assert not any(data[at : len(data) - 4 * num_segments])
    return np.concatenate(parts)


# Memory


class Guarded:
    """A range whose end is the end of readable memory, and before which lie bytes that must stay as they are."""

    def __init__(self, nbytes: int) -> None:
        readable = -(-(nbytes + 256) // PAGE) * PAGE
        self._pages = mmap.mmap(-1, readable + PAGE)
        memory = np.frombuffer(self._pages, np.uint8)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + readable), PAGE, 0) == 0
        self._before, self.bytes = memory[: readable - nbytes], memory[readable - nbytes : readable]
        self._before[:] = np.arange(self._before.size) % 251
        self.address = self.bytes.ctypes.data

    def check(self) -> None:
        assert np.array_equal(self._before, np.arange(self._before.size) % 251)


def compress(words: np.ndarray, isa: str = "auto", num_threads: int = 1) -> bytes | None:
    memory = Guarded(words.nbytes)
    memory.bytes[:] = words.view(np.uint8)
    num_bytes = _native.compress(POOLS[num_threads], memory.address, words.size, words.itemsize, isa)
    memory.check()
    assert num_bytes % PAGE == 0 or num_bytes == words.nbytes
    assert num_bytes <= words.nbytes
    if num_bytes < words.nbytes:
        return memory.bytes[:num_bytes].tobytes()
    assert np.array_equal(memory.bytes, words.view(np.uint8))
    return None


def decompress(data: bytes, num_words: int, word_bytes: int, isa: str = "auto", num_threads: int = 1) -> np.ndarray:
    memory = Guarded(num_words * word_bytes)
    memory.bytes[: len(data)] = np.frombuffer(data, np.uint8)
    memory.bytes[len(data) :] = 0xA5
    try:
        _native.decompress(POOLS[num_threads], memory.address, len(data), num_words, word_bytes, isa)
    finally:
        memory.check()
    return memory.bytes.copy().view(WORDS[word_bytes])


def check(words: np.ndarray) -> bytes | None:
    """Everything that is promised of these words; returns what they are compressed to."""
    expected = compressed(words)
    if expected is not None:
        assert np.array_equal(decompressed(expected, words.size, words.itemsize), words)
    for isa in ISAS:
        for num_threads in POOLS:
            assert compress(words, isa, num_threads) == expected
            if expected is not None:
                back = decompress(expected, words.size, words.itemsize, isa, num_threads)
                assert np.array_equal(back, words)
    return expected


# Words


def random_words(count: int, word_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256**word_bytes, count, dtype=WORDS[word_bytes])


def narrow_words(count: int, word_bytes: int, seed: int = 0, *, signs: bool = False, width: int = 3) -> np.ndarray:
    """Whose top bytes differ by less than 2^width within a group."""
    generator = np.random.default_rng(seed)
    groups = random_words(count, word_bytes, seed).reshape(-1, GROUP)
    base = generator.integers(0, 129 - 2**width, (groups.shape[0], 1), dtype=groups.dtype)
    tops = base + generator.integers(0, 2**width, groups.shape, dtype=groups.dtype)
    low_bits = 8 * word_bytes - 8
    words = (tops << low_bits | groups & (2**low_bits - 1)).ravel()
    if signs:
        words |= (generator.integers(0, 2, count, dtype=groups.dtype)) << (8 * word_bytes - 1)
    return words.astype(WORDS[word_bytes])


def of_size(fp32_bits: list[int], word_bytes: int) -> np.ndarray:
    bits = np.array(fp32_bits, np.uint32)
    return bits if word_bytes == 4 else (bits >> 16).astype(np.uint16)


def with_zeros(words: np.ndarray) -> np.ndarray:
    """So much is saved by what follows the words that they are compressed, whatever they are."""
    return np.concatenate([words, np.zeros(2 * SEGMENT, words.dtype)])


KINDS = ["zeros", "one", "narrow", "signed", "bytes", "random"]


@st.composite
def arbitrary_words(draw: st.DrawFn) -> np.ndarray:
    """Up to three segments and a bit: runs of groups of several kinds."""
    word_bytes = draw(st.sampled_from([4, 2]))
    runs = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5)):
        count = GROUP * draw(st.integers(1, 90))
        seed = draw(st.integers(0, 2**32 - 1))
        if kind in ("narrow", "signed"):
            width = draw(st.integers(0, 7))
            run = narrow_words(count, word_bytes, seed, signs=kind == "signed", width=width)
        elif kind == "random":
            run = random_words(count, word_bytes, seed)
        else:
            run = np.zeros(count, WORDS[word_bytes])
            if kind == "one":
                run[seed % count] = 1 << draw(st.integers(0, 8 * word_bytes - 1))
            elif kind == "bytes":
                piece = draw(st.binary(min_size=word_bytes * GROUP, max_size=word_bytes * GROUP))
                run[:] = np.tile(np.frombuffer(piece, run.dtype), count // GROUP)
        runs.append(run)
    words = np.concatenate(runs)
    return with_zeros(words) if draw(st.booleans()) else words


# Round trips


@given(words=arbitrary_words())
@settings(deadline=None, max_examples=150)
def test_any_words_come_back_and_the_twin_agrees(words):
    check(words)


@EVERY_SIZE
@pytest.mark.parametrize("num_groups", [1, 127, 128, 129, 383, 384, 385, 1000])
def test_any_number_of_groups_is_compressed(word_bytes, num_groups):
    words = narrow_words(num_groups * GROUP, word_bytes, signs=True)
    data = check(words)
    assert data is not None or num_groups < 383, "a page is saved"


@EVERY_SIZE
@pytest.mark.parametrize("width", range(9))
def test_every_width_comes_back(word_bytes, width):
    words = narrow_words(3 * SEGMENT, word_bytes, width=min(width, 7))
    low_bits = 8 * word_bytes - 8
    words[::GROUP] &= 2**low_bits - 1  # the least and the largest top byte there can be
    words[1::GROUP] |= np.array((2**width - 1) << low_bits, words.dtype)
    words[: 2 * GROUP] = 0
    data = check(with_zeros(words))
    assert data is not None


SPECIAL = {
    "nan": [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF812345, 0xFFFFFFFF],
    "infinity": [0x7F800000, 0xFF800000],
    "zeros of both signs": [0x80000000, 0x00000000],
    "minus zero": [0x80000000],
    "denormals": [0x00000001, 0x007FFFFF, 0x00010000, 0x80000001, 0x807FFFFF, 0x80400000],
    "ends of the range": [0x00800000, 0x7F7FFFFF, 0x80800000, 0xFF7FFFFF],
    "alternating signs": [0x3F800000, 0xBF800000],
    "one value": [0x3F8CCCCD],
    "everything": [0x7FC00001, 0xFF800000, 0x80000000, 0, 1, 0x807FFFFF, 0x00800000, 0xFF7FFFFF, 0x3F800000],
}


@EVERY_SIZE
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_come_back(name, word_bytes):
    values = of_size(SPECIAL[name], word_bytes)
    chosen = values[np.random.default_rng(1).integers(0, values.size, 3 * SEGMENT + 3 * GROUP)]
    among_others = np.concatenate([chosen, narrow_words(2 * SEGMENT, word_bytes)])
    among_others[::7] = among_others[-1]
    for words in (np.resize(values, 4 * SEGMENT), chosen, among_others):
        assert check(with_zeros(words)) is not None


@EVERY_SIZE
def test_a_group_of_zeros_takes_two_bytes(word_bytes):
    num_segments = 1000
    words = np.zeros(num_segments * SEGMENT, WORDS[word_bytes])
    data = check(words)
    assert data is not None
    assert len(data) == -(-num_segments * (2 * SEGMENT // GROUP + 4) // PAGE) * PAGE


@EVERY_SIZE
def test_one_word_among_zeros_comes_back_wherever_it_is(word_bytes):
    for bit in range(8 * word_bytes):
        words = np.zeros(2 * SEGMENT, WORDS[word_bytes])
        words[np.arange(0, words.size, GROUP) + (np.arange(words.size // GROUP) + bit) % GROUP] = 1 << bit
        words[SEGMENT : SEGMENT + GROUP] = 0
        assert check(with_zeros(words)) is not None


@EVERY_SIZE
def test_words_that_do_not_shrink_stay_as_they_are(word_bytes):
    # `compress` compares the memory.
    assert check(random_words(5 * SEGMENT + GROUP, word_bytes)) is None
    assert check(narrow_words(GROUP, word_bytes)) is None


@EVERY_SIZE
def test_words_that_shrink_by_less_than_a_page_are_put_back(word_bytes):
    # The first two are moved before it is known that the others save nothing.
    words = random_words(7 * SEGMENT, word_bytes)
    words[3 * GROUP : 9 * GROUP] = 0
    words[SEGMENT : SEGMENT + 3 * GROUP] = 0
    assert compressed_segment(words[:SEGMENT])[0] & RAW == 0
    assert check(words) is None


@EVERY_SIZE
def test_raw_segments_lie_among_compressed_ones(word_bytes):
    random, narrow = random_words(2 * SEGMENT, word_bytes), narrow_words(2 * SEGMENT, word_bytes)
    for words in ([random, narrow, random, narrow[:GROUP]], [narrow, random, random, narrow], [narrow, random[:GROUP]]):
        data = check(np.concatenate(words))
        assert data is not None


@EVERY_SIZE
def test_only_segments_with_a_sign_are_rotated(word_bytes):
    words = narrow_words(4 * SEGMENT, word_bytes)
    words[2 * SEGMENT - 1] |= 1 << (8 * word_bytes - 1)
    words[2 * SEGMENT] |= 1 << (8 * word_bytes - 1)
    data = check(words)
    assert data is not None
    assert [entry & ROTATED != 0 for entry in struct.unpack("<4I", data[-16:])] == [False, True, True, False]


@EVERY_SIZE
def test_segments_of_many_threads_go_where_others_were(word_bytes):
    # Some stay, some go where they were themselves, some far away.
    zeros, random = np.zeros(64 * SEGMENT, WORDS[word_bytes]), random_words(64 * SEGMENT, word_bytes)
    narrow = narrow_words(64 * SEGMENT, word_bytes, signs=True)
    order = [random, *[narrow] * 3, *[zeros] * (8 // word_bytes), *[narrow] * 30, random, random, narrow[:-GROUP]]
    words = np.concatenate(order)
    memory = Guarded(words.nbytes)
    view = memory.bytes.view(words.dtype)
    view[:] = words
    num_bytes = _native.compress(POOLS[1], memory.address, words.size, word_bytes)
    expected = memory.bytes[:num_bytes].copy()
    for num_threads in (1, 2, 3, 16):
        pool = _native.ThreadPool(num_threads)
        _native.decompress(pool, memory.address, num_bytes, words.size, word_bytes)
        assert np.array_equal(view, words)
        assert _native.compress(pool, memory.address, words.size, word_bytes) == num_bytes
        assert np.array_equal(memory.bytes[:num_bytes], expected)
        memory.check()
        pool.close()


# What it is for


def simulated_moments() -> dict[str, np.ndarray]:
    """Of a hundred AdamW steps: each row of gradients is normal, of a scale of its own."""
    generator = np.random.default_rng(3)
    shape = (96, 1024)
    scale = np.exp(generator.standard_normal((shape[0], 1))) * 1e-4
    exp_avg, exp_avg_sq = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for _ in range(100):
        grad = (scale * generator.standard_normal(shape)).astype(np.float32)
        exp_avg += np.float32(0.1) * (grad - exp_avg)
        exp_avg_sq += np.float32(0.001) * (grad * grad - exp_avg_sq)
    return {"exp_avg": exp_avg.ravel(), "exp_avg_sq": exp_avg_sq.ravel()}


@pytest.mark.parametrize(
    ("name", "word_bytes", "share"),
    [("exp_avg", 4, 0.88), ("exp_avg_sq", 4, 0.80), ("exp_avg", 2, 0.80), ("exp_avg_sq", 2, 0.65)],
)
def test_moments_shrink(name, word_bytes, share):
    words = of_size(simulated_moments()[name].view(np.uint32), word_bytes)
    data = check(words)
    assert data is not None
    assert 0.4 < len(data) / words.nbytes < share


# What was damaged


def damaged(data: bytes, num_segments: int, generator: np.random.Generator) -> Iterator[bytes]:
    """Compressed bytes with something wrong, first what a reader trusts most: table and headers."""
    table = len(data) - 4 * num_segments
    entries = struct.unpack(f"<{num_segments}I", data[table:])

    def changed(at: int, value: bytes) -> bytes:
        return data[:at] + value + data[at + len(value) :]

    begin = 0
    for i, entry in enumerate(entries):
        lengths = [entry % RAW + delta for delta in (-66, -2, -1, 1, 2, 66)]
        for wrong in [0, 1, 2**32 - 1, 2**30 - 1, entry ^ RAW, entry ^ ROTATED, entry ^ 1 << 29, *lengths]:
            yield changed(table + 4 * i, struct.pack("<I", wrong))
            # Another one makes up for it, so the sum is right.
            other = (i + 1) % num_segments
            made_up = bytearray(changed(table + 4 * i, struct.pack("<I", wrong)))
            balance = (entries[other] + entry - wrong) % 2**32
            made_up[table + 4 * other : table + 4 * other + 4] = struct.pack("<I", balance)
            yield bytes(made_up)
        for width in range(256) if i == 0 else (0, 8, 9, 127, 254, 255):
            yield changed(begin + 1, bytes([width]))
        yield changed(begin, bytes([data[begin] ^ 255, 255]))
        begin += entry % RAW
    for nbytes in [0, 1, 4 * num_segments, PAGE, len(data) - PAGE, len(data) - 1]:
        yield data[:nbytes]
        yield data[:nbytes] + data[len(data) - 4 * num_segments :]
    for pages in (1, 2):
        yield data + bytes(pages * PAGE)
        yield data[:table] + bytes(pages * PAGE) + data[table:]
    for _ in range(150):
        at = generator.integers(0, len(data), generator.integers(1, 40))
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[at] = generator.integers(0, 256, at.size)
        yield damaged.tobytes()
        yield generator.integers(0, 256, table, dtype=np.uint8).tobytes() + data[table:]
        # Headers of width 0 to 8 throughout, in the place of planes and low bytes too.
        yield generator.integers(0, 9, table, dtype=np.uint8).tobytes() + data[table:]


@EVERY_ISA
@EVERY_SIZE
def test_damaged_bytes_are_refused_or_give_words_and_touch_nothing_else(isa, word_bytes):
    words = np.concatenate(
        [
            narrow_words(SEGMENT, word_bytes, signs=True),
            random_words(SEGMENT, word_bytes),
            narrow_words(SEGMENT, word_bytes, width=1),
            narrow_words(5 * GROUP, word_bytes),
        ]
    )
    data = compress(words)
    assert data is not None
    outcomes = {"refused": 0, "words": 0}
    for i, wrong in enumerate(damaged(data, 4, np.random.default_rng(5))):
        if len(wrong) > words.nbytes:
            continue
        try:
            # The range ends where memory does, and `decompress` compares what lies before it.
            decompress(wrong, words.size, word_bytes, isa, num_threads=3 if i % 2 else 1)
            outcomes["words"] += 1
        except ValueError as error:
            assert "is not a compressed range: " in str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 600
    assert outcomes["words"] > 0


@EVERY_ISA
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_bytes_behind_a_table_that_fits_touch_nothing_else(isa, data):
    word_bytes = data.draw(st.sampled_from([4, 2]))
    num_words = 2 * SEGMENT + GROUP
    raw = [SEGMENT * word_bytes, SEGMENT * word_bytes, GROUP * word_bytes]
    lengths = [data.draw(st.integers(0, most - 1)) for most in raw]
    flags = data.draw(st.lists(st.sampled_from([0, ROTATED]), min_size=3, max_size=3))
    table = struct.pack("<3I", *(length | flag for length, flag in zip(lengths, flags, strict=True)))
    num_bytes = -(-(sum(lengths) + len(table)) // PAGE) * PAGE
    if num_bytes >= num_words * word_bytes:
        return
    # Small numbers are headers that can be followed.
    below = data.draw(st.sampled_from([2, 9, 256]))
    body = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).integers(
        0, below, num_bytes - 12, dtype=np.uint8
    )
    try:
        decompress(body.tobytes() + table, num_words, word_bytes, isa, num_threads=3)
    except ValueError as error:
        assert "is not a compressed range: " in str(error)


@EVERY_SIZE
@EVERY_ISA
def test_what_is_wrong_is_said(isa, word_bytes):
    words = narrow_words(3 * SEGMENT, word_bytes)
    data = compress(words)
    assert data is not None
    wrong = bytearray(data)
    wrong[1] = 9
    with pytest.raises(ValueError, match=r"is not a compressed range: its segment 0 is not 128 groups in \d+ bytes"):
        decompress(bytes(wrong), words.size, word_bytes, isa)
    # Groups that end before their segment does.
    wrong = bytearray(data)
    wrong[: 2 * SEGMENT // GROUP] = bytes([0, 255]) * (SEGMENT // GROUP)
    with pytest.raises(ValueError, match="is not a compressed range: its segment 0 is not 128 groups"):
        decompress(bytes(wrong), words.size, word_bytes, isa)
    wrong = bytearray(data)
    wrong[-4:] = struct.pack("<I", SEGMENT * word_bytes)
    with pytest.raises(ValueError, match=r"its table has \d+ for segment 2 of \d+ bytes"):
        decompress(bytes(wrong), words.size, word_bytes, isa)
    wrong[-4:] = struct.pack("<I", 0)
    with pytest.raises(ValueError, match=rf"{len(data)} bytes .* the segments in its table have \d+"):
        decompress(bytes(wrong), words.size, word_bytes, isa)
    with pytest.raises(ValueError, match=r"compressed to a multiple of 4096 below \d+ and with a table of 12"):
        decompress(data[:-1], words.size, word_bytes, isa)


# Arguments


def test_wrong_arguments_are_refused():
    pool, words = POOLS[1], np.zeros(2 * SEGMENT, np.uint32)
    at = words.ctypes.data
    with pytest.raises(ValueError, match="word_bytes is 3: words have 2 or 4 bytes"):
        _native.compress(pool, at, 64, 3)
    with pytest.raises(ValueError, match="num_words is 65: words are compressed in groups of 64"):
        _native.decompress(pool, at, 0, 65, 4)
    with pytest.raises(ValueError, match="null address"):
        _native.compress(pool, 0, 64, 4)
    with pytest.raises(ValueError, match="not a multiple of 4 bytes"):
        _native.decompress(pool, at + 2, PAGE, SEGMENT, 4)
    with pytest.raises(ValueError, match="not available here"):
        _native.compress(pool, at, 64, 4, "avx1024")
    assert _native.compress(pool, 0, 0, 4) == 0
    with pytest.raises(ValueError, match="is not a compressed range"):
        _native.decompress(pool, 0, 0, 0, 4)
    # More than there is memory, or than can be counted.
    with pytest.raises(ValueError, match="is not a compressed range"):
        _native.decompress(pool, at, PAGE, 2**62, 4)
    assert not words.any()


def test_closed_pool_is_refused_and_nothing_changes():
    pool = _native.ThreadPool(2)
    pool.close()
    words = narrow_words(3 * SEGMENT, 4)
    memory = words.copy()
    with pytest.raises(ValueError, match="thread pool is closed"):
        _native.compress(pool, memory.ctypes.data, memory.size, 4)
    assert np.array_equal(memory, words)
