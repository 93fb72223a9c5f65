"""Types of the native module. Addresses are plain integers; the caller keeps the memory alive."""

from collections.abc import Sequence

# kernels

class ThreadPool:
    """Threads that share one loop at a time; callers from several Python threads queue up.

    One thread without `cpus` means the caller's own. With `cpus`, thread i is pinned to cpus[i].
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None: ...
    def close(self) -> None:
        """Wait for the loop in progress and end the threads; kernels then refuse this pool."""

    @property
    def num_threads(self) -> int: ...

def available_isas() -> list[str]:
    """Instruction sets of this CPU and build, narrowest first. All give the same bits."""

def adamw(
    pool: ThreadPool,
    isa: str,
    moments: str,
    grad: int,
    grad_dtype: str,
    weight: int,
    residual: int,
    exp_avg: int,
    exp_avg_sq: int,
    exp_avg_scale: int,
    exp_avg_sq_scale: int,
    count: int,
    first: int,
    seed: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> None:
    """One AdamW step in place; step counts from 1.

    The weight is bf16 joined with residual (int16), or with residual 0 an fp32 of its own. `moments` is "float32",
    "bfloat16" or "int8"; see `runtime/optimizer.py` for what belongs to each. `seed` has 32 bits.
    """

def split(pool: ThreadPool, fp32: int, weight: int, residual: int, count: int, isa: str = "auto") -> None:
    """Cut fp32 into bf16 rounded to nearest (ties away from zero) and the int16 that restores it.

    Exact for every value but NaN, which becomes 0x7fc0 and 0. Values from 0x7f7f8000 (3.396e38) up round to
    an infinite weight, as in any bf16 conversion; their residual still restores them.
    """

def join(pool: ThreadPool, weight: int, residual: int, fp32: int, count: int, isa: str = "auto") -> None:
    """The inverse of split: bits32 = (weight << 16) + residual."""

def to_bfloat16(pool: ThreadPool, fp32: int, bf16: int, count: int, isa: str = "auto") -> None:
    """Round to nearest, ties to even; NaN becomes 0x7fc0."""

def from_bfloat16(pool: ThreadPool, bf16: int, fp32: int, count: int, isa: str = "auto") -> None: ...
def add_fp32(pool: ThreadPool, dst: int, src: int, count: int, isa: str = "auto") -> None:
    """dst += src."""

def sum_of_squares(
    pool: ThreadPool,
    values: int,
    dtype: str,
    count: int,
    partials: int,
    granule: int = 2048,
    isa: str = "auto",
) -> None:
    """One fp64 sum per granule, the last granule perhaps shorter.

    A partial depends on its granule alone, so cutting a tensor at multiples of the granule changes none of
    them. math.fsum over the partials is exact, hence the same for every order. Only non-finite input gives a
    non-finite partial.
    """

def compress(pool: ThreadPool, address: int, num_words: int, word_bytes: int, isa: str = "auto") -> int:
    """Compress words of 2 or 4 bytes in place, losing no bit; return how many bytes from `address` now hold them.

    That is a multiple of 4096. When it would not be less than before, the range stays as it is, and the number
    returned is its size. num_words is a multiple of 64. The bytes are the same whatever the instruction set and the
    number of threads; `native/kernels_compress.h` says what they mean.
    """

def decompress(
    pool: ThreadPool, address: int, num_bytes: int, num_words: int, word_bytes: int, isa: str = "auto"
) -> None:
    """The inverse of compress, in place; num_bytes is what it returned, if that was less than the range has.

    ValueError when these bytes are not compressed words. The range may then be scrambled, but nothing outside was
    read or written.
    """

def crc32c(address: int, nbytes: int, seed: int = 0) -> int:
    """CRC32C; seed with the CRC of the bytes before to continue it."""

def crc32c_portable(address: int, nbytes: int, seed: int = 0) -> int:
    """The same without special instructions."""

def crc32c_combine(crc1: int, crc2: int, nbytes2: int) -> int:
    """CRC of A followed by B from both CRCs and the length of B."""

def memory_pass(pool: ThreadPool, address: int, nbytes: int) -> None:
    """Read every cache line, rewrite three of each four: 1.75 * nbytes of traffic. Scrambles the contents."""

# I/O: `runtime/io.py` is the only caller and says what the values mean.

class IoEngine:
    def __init__(
        self,
        use_uring: bool,
        queue_depth: int,
        num_threads: int,
        piece_bytes: int,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        total_bytes_per_s: float,
    ) -> None: ...
    def submit(
        self, is_write: bool, fd: int, offset: int, address: int, nbytes: int, urgent: bool, alignment: int
    ) -> int | None: ...
    def wait(self, ticket: int) -> tuple[int, int]: ...
    def poll(self, ticket: int) -> bool: ...
    def counters(self) -> tuple[int, int, int, int, float, int]: ...
    def add_fault(
        self, kind: str, value: int, direction: str, nth: int, probability: float, seed: int, piece: int
    ) -> None: ...
    def clear_faults(self) -> None: ...
    def close(self, cancel: bool) -> None: ...

def probe_uring() -> tuple[int, str]: ...
def direct_alignment(fd: int) -> tuple[bool, int, int]: ...
