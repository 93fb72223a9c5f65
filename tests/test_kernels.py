"""The native kernels against slow references: torch in fp64, numpy, integer arithmetic and a bitwise CRC."""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import child
from greedysnake import _native
from greedysnake.errors import ConfigError
from greedysnake.runtime.optimizer import (
    AdamW,
    Fp32Chunk,
    Gradient,
    SplitChunk,
    update_fp32,
    update_split,
)
from threads import require_threads

ISAS = _native.available_isas()
POOL = _native.ThreadPool(1)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def split(values: np.ndarray, pool: _native.ThreadPool = POOL, isa: str = "auto"):
    weight, residual = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
    _native.split(pool, address(values), address(weight), address(residual), values.size, isa)
    return weight, residual


def join(weight: np.ndarray, residual: np.ndarray, pool: _native.ThreadPool = POOL, isa: str = "auto"):
    values = np.empty(weight.size, np.float32)
    _native.join(pool, address(weight), address(residual), address(values), weight.size, isa)
    return values


def as_float(bits) -> np.ndarray:
    return np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32)


def widened(weight: np.ndarray) -> np.ndarray:
    return as_float(weight.astype(np.uint32) << 16)


def interesting_floats() -> np.ndarray:
    mantissas = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x18001, 0x3F8000]
    mantissas += [0x400000, 0x407FFF, 0x7F7FFF, 0x7F8000, 0x7F8001, 0x7FFFFE, 0x7FFFFF]
    high = np.arange(512, dtype=np.uint32)[:, None] << 23
    bits = (high | np.array(mantissas, np.uint32)[None, :]).ravel()
    random = np.random.default_rng(0).integers(0, 2**32, 100_003, dtype=np.uint32)
    return as_float(np.concatenate([bits, random]))


def check_split(values: np.ndarray, isa: str, pool: _native.ThreadPool = POOL) -> None:
    weight, residual = split(values, pool, isa)
    back = join(weight, residual, pool, isa)
    nan = np.isnan(values)
    assert np.array_equal(back.view(np.uint32)[~nan], values.view(np.uint32)[~nan])
    assert np.isnan(back[nan]).all() and np.isnan(widened(weight)[nan]).all()
    bits = values.view(np.uint32)
    rounds_to_infinity = (bits & 0x7FFFFFFF) >= 0x7F7F8000
    assert np.isfinite(widened(weight)[~rounds_to_infinity]).all()
    infinite = np.isinf(values)
    assert np.array_equal(widened(weight)[infinite], values[infinite])


# split and join


@pytest.mark.parametrize("isa", ISAS)
def test_join_restores_what_split_cut(isa):
    check_split(interesting_floats(), isa)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", ISAS)
def test_join_restores_every_fp32(isa):
    block = np.arange(2**24, dtype=np.uint32)
    pool = _native.ThreadPool(os.cpu_count() or 1)
    for high in range(256):
        check_split(as_float(block | np.uint32(high << 24)), isa, pool)


def test_weight_is_the_nearest_bf16():
    values = interesting_floats()
    values = values[np.abs(values) < 3.3e38]
    weight, _ = split(values)
    exact = values.astype(np.float64)
    error = np.abs(widened(weight).astype(np.float64) - exact)
    for neighbour in (weight + np.uint16(1), weight - np.uint16(1)):
        # A step below zero wraps to NaN: no closer neighbour there.
        assert not (np.abs(widened(neighbour).astype(np.float64) - exact) < error).any()


def test_infinity_and_nan_stay_what_they_are():
    values = as_float([0x7F800000, 0xFF800000, 0x7F800001, 0x7F807FFF, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
    weight, residual = split(values)
    assert weight.tolist() == [0x7F80, 0xFF80] + [0x7FC0] * 5
    assert residual.tolist() == [0] * 7


def test_largest_fp32_has_an_infinite_weight_and_still_joins():
    values = as_float([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF])
    weight, residual = split(values)
    assert weight.tolist() == [0x7F80, 0x7F80, 0x7F7F, 0xFF80]
    assert residual.tolist() == [-1, -32768, 32767, -1]
    assert np.array_equal(join(weight, residual), values)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_conversion_matches_torch(isa):
    values = interesting_floats()
    rounded = np.empty(values.size, np.uint16)
    _native.to_bfloat16(POOL, address(values), address(rounded), values.size, isa)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(rounded[~nan], expected[~nan])
    assert (rounded[nan] == 0x7FC0).all()
    back = np.empty(values.size, np.float32)
    _native.from_bfloat16(POOL, address(rounded), address(back), values.size, isa)
    assert np.array_equal(back.view(np.uint32), widened(rounded).view(np.uint32))


# AdamW


class SplitState:
    def __init__(self, master: torch.Tensor) -> None:
        self.weight = torch.empty(master.numel(), dtype=torch.bfloat16)
        self.residual = torch.empty(master.numel(), dtype=torch.int16)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
        _native.split(POOL, master.data_ptr(), self.weight.data_ptr(), self.residual.data_ptr(), master.numel())
        self.chunk = SplitChunk.of(self.weight, self.residual, self.exp_avg, self.exp_avg_sq)

    def update(self, optimizer: AdamW, grad: torch.Tensor, *, pool=POOL, **options) -> None:
        update_split(pool, optimizer, self.chunk, Gradient.of(grad), **options)

    def master(self) -> torch.Tensor:
        master = torch.empty(self.weight.numel())
        _native.join(POOL, self.weight.data_ptr(), self.residual.data_ptr(), master.data_ptr(), master.numel())
        return master

    def bits(self) -> list[bytes]:
        parts = [self.weight.view(torch.int16), self.residual, self.exp_avg, self.exp_avg_sq]
        return [part.numpy().tobytes() for part in parts]


class Fp32State:
    def __init__(self, master: torch.Tensor) -> None:
        self.weight = master.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
        self.chunk = Fp32Chunk.of(self.weight, self.exp_avg, self.exp_avg_sq)

    def update(self, optimizer: AdamW, grad: torch.Tensor, *, pool=POOL, **options) -> None:
        update_fp32(pool, optimizer, self.chunk, Gradient.of(grad), **options)

    def master(self) -> torch.Tensor:
        return self.weight

    def bits(self) -> list[bytes]:
        return [part.numpy().tobytes() for part in (self.weight, self.exp_avg, self.exp_avg_sq)]


STATES = pytest.mark.parametrize("state_class", [SplitState, Fp32State])
GRAD_DTYPES = pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])


def random_grad(count: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary values, with zeros, denormals, tiny and huge ones among them, each kind in its own places."""
    grad = torch.randn(count, generator=generator)
    grad[6::7] = 0
    grad[1::7] *= 1e-39
    grad[2::7] *= 1e-20
    grad[3::7] *= 1e15
    return grad


class TorchReference:
    """torch.optim.AdamW in fp64."""

    def __init__(self, master: torch.Tensor, optimizer: AdamW) -> None:
        self.parameter = torch.nn.Parameter(master.double())
        self.optimizer = torch.optim.AdamW(
            [self.parameter],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def update(self, grad: torch.Tensor) -> None:
        self.parameter.grad = grad.double()
        self.optimizer.step()

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.optimizer.state[self.parameter]
        return state["exp_avg"], state["exp_avg_sq"]


@STATES
@GRAD_DTYPES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.3), (0.8, 0.0)])
@pytest.mark.parametrize(("count", "eps"), [(1, 1e-8), (3001, 1e-8), (3001, 0.3)])
def test_hundred_steps_follow_torch_in_fp64(state_class, grad_dtype, weight_decay, betas, count, eps):
    optimizer = AdamW(lr=1e-3, betas=betas, eps=eps, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(1)
    start = 0.1 * torch.randn(count, generator=generator)
    state, reference = state_class(start), TorchReference(start, optimizer)
    ulp, smallest = 2.0**-23, 2.0**-149
    largest_grad = torch.zeros(count, dtype=torch.float64)
    weight_bound = torch.zeros(count, dtype=torch.float64)
    for step in range(1, 101):
        grad = random_grad(count, generator).to(grad_dtype)
        before = reference.parameter.detach().clone()
        state.update(optimizer, grad, step=step)
        reference.update(grad)
        largest_grad = torch.maximum(largest_grad, grad.double().abs())
        exp_avg, exp_avg_sq = reference.moments()
        # m: a step rounds three times relative to the largest gradient and forgets at rate 1 - beta1; below
        # the normal range each rounding may lose a whole denormal.
        avg_bound = 3 / (1 - betas[0]) * (ulp * largest_grad + smallest)
        # v: no term is negative, so errors are relative: about two half-ulps per remembered step.
        relative_bound = 2 * min(step, 1 / (1 - betas[1])) * ulp
        # Weight: half an ulp for the subtraction; then the error of m, and that of v and four operations.
        weight = reference.parameter.detach()
        change = (weight - before).abs() + optimizer.lr * weight_decay * before.abs()
        denominator = (exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps
        step_size = optimizer.lr / (1 - betas[0] ** step)
        weight_bound += torch.maximum(weight.abs(), before.abs()) * ulp / 2 + smallest
        weight_bound += step_size * avg_bound / denominator + change * (relative_bound + 4 * ulp)
    assert ((state.exp_avg.double() - exp_avg).abs() <= avg_bound).all()
    v_bound = relative_bound * (exp_avg_sq + smallest / ulp)
    assert ((state.exp_avg_sq.double() - exp_avg_sq).abs() <= v_bound).all()
    assert ((state.master().double() - weight).abs() <= weight_bound).all()
    # The bound is worth something: well below what the steps did.
    assert weight_bound.median() < 1e-3 * (weight - start).abs().max()


@STATES
def test_error_is_not_above_that_of_torch_in_fp32(state_class):
    optimizer = AdamW(lr=1e-4, weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(20_000, generator=generator)
    state, reference = state_class(start), TorchReference(start, optimizer)
    plain = TorchReference(start, optimizer)
    plain.parameter.data = start.clone()
    for step in range(1, 101):
        grad = torch.randn(start.numel(), generator=generator)
        state.update(optimizer, grad, step=step)
        reference.update(grad)
        plain.parameter.grad = grad.clone()
        plain.optimizer.step()
    truth = reference.parameter.detach()
    ours = (state.master().double() - truth).square().mean()
    theirs = (plain.parameter.detach().double() - truth).square().mean()
    assert ours <= theirs


def hostile_state(state_class, count: int):
    """State and gradient holding infinities and NaNs besides ordinary values."""
    generator = torch.Generator().manual_seed(3)
    state = state_class(torch.randn(count, generator=generator))
    state.exp_avg.copy_(random_grad(count, generator))
    state.exp_avg_sq.copy_(random_grad(count, generator).abs())
    grad = random_grad(count, generator)
    grad[4::31], grad[5::31], grad[6::31], grad[7::31] = math.inf, -math.inf, math.nan, 3e38
    state.exp_avg[8::31], state.exp_avg[4::62] = math.inf, math.nan
    state.exp_avg_sq[9::31], state.exp_avg_sq[5::62] = math.inf, math.nan
    return state, grad


@STATES
@GRAD_DTYPES
@pytest.mark.parametrize("count", [1, 7, 15, 16, 33, 1000, 70_001])
def test_bits_do_not_depend_on_instruction_set_or_threads(state_class, grad_dtype, count):
    expected = None
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            pool = _native.ThreadPool(num_threads)
            state, grad = hostile_state(state_class, count)
            for step in (1, 2, 3):
                state.update(AdamW(lr=1e-2), grad.to(grad_dtype), step=step, grad_scale=0.37, isa=isa, pool=pool)
            pool.close()
            expected = expected or state.bits()
            assert state.bits() == expected, (isa, num_threads)


def test_split_and_fp32_weights_take_the_same_steps():
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(5000, generator=generator)
    split_state, fp32_state = SplitState(start), Fp32State(start)
    for step in range(1, 20):
        grad = torch.randn(5000, generator=generator)
        split_state.update(AdamW(lr=1e-2), grad, step=step)
        fp32_state.update(AdamW(lr=1e-2), grad, step=step)
    assert torch.equal(split_state.master(), fp32_state.master())
    assert not torch.equal(fp32_state.master(), start)


@STATES
@GRAD_DTYPES
def test_grad_scale_multiplies_the_gradient_first(state_class, grad_dtype):
    start = torch.linspace(-1, 1, 999)
    grad = torch.linspace(-3, 3, 999).to(grad_dtype)
    scaled, direct = state_class(start), state_class(start)
    scaled.update(AdamW(lr=1e-2), grad, step=1, grad_scale=0.3)
    direct.update(AdamW(lr=1e-2), grad.float() * 0.3, step=1)
    assert scaled.bits() == direct.bits()
    unscaled = state_class(start)
    unscaled.update(AdamW(lr=1e-2), grad, step=1)
    assert unscaled.bits() != direct.bits()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_denormals_survive_flush_mode_of_the_caller(isa, num_threads):
    grad = torch.full((100_000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        pool = _native.ThreadPool(num_threads)
        state = Fp32State(torch.zeros(grad.numel()))
        state.update(AdamW(lr=1.0, eps=1e-30), grad, step=1, isa=isa, pool=pool)
        pool.close()
    finally:
        torch.set_flush_denormal(False)
    assert (state.exp_avg.view(torch.int32) > 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_square_that_overflows_saturates_and_recovers(isa):
    state = Fp32State(torch.ones(40))
    state.update(AdamW(lr=1e-3), torch.full((40,), 1e30), step=1, isa=isa)
    assert torch.isfinite(state.exp_avg_sq).all()
    before = state.exp_avg_sq.clone()
    state.update(AdamW(lr=1e-3), torch.ones(40), step=2, isa=isa)
    assert (state.exp_avg_sq < before).all()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"lr": 1.0, "betas": (-0.1, 0.9)}, r"betas\[0\] is -0.1"),
        ({"lr": 1.0, "betas": (0.9,)}, "betas is"),
        ({"lr": 1.0, "eps": -1e-8}, "eps is -1e-08"),
        ({"lr": 1.0, "weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_impossible_hyperparameters_are_named(values, word):
    with pytest.raises(ConfigError, match=word):
        AdamW(**values)


def test_wrong_tensors_are_named():
    zeros = torch.zeros(8)
    with pytest.raises(ConfigError, match="exp_avg_sq has 4 elements"):
        Fp32Chunk.of(zeros, zeros, zeros[:4])
    with pytest.raises(ConfigError, match="not contiguous"):
        Fp32Chunk.of(zeros[::2], zeros[:4], zeros[:4])
    with pytest.raises(ConfigError, match=r"weight is torch\.float32"):
        SplitChunk.of(zeros, zeros, zeros, zeros)
    with pytest.raises(ConfigError, match=r"gradient is torch\.float16"):
        Gradient.of(zeros.half())
    with pytest.raises(ConfigError, match="gradient has 4 elements, the chunk 8"):
        Fp32State(zeros).update(AdamW(lr=1.0), zeros[:4], step=1)


def test_wrong_native_arguments_are_named():
    state, grad = Fp32State(torch.zeros(8)), torch.zeros(8)
    with pytest.raises(ValueError, match='"avx9" is not available here: use "auto"'):
        state.update(AdamW(lr=1.0), grad, step=1, isa="avx9")
    with pytest.raises(ValueError, match="step is 0"):
        state.update(AdamW(lr=1.0), grad, step=0)
    with pytest.raises(ValueError, match='dtype "float16" is not known'):
        _native.sum_of_squares(POOL, grad.data_ptr(), "float16", 8, grad.data_ptr())
    with pytest.raises(ValueError, match="src is a null address"):
        _native.add_fp32(POOL, grad.data_ptr(), 0, 8)
    with pytest.raises(ValueError, match=r"src is at .* not a multiple of 4"):
        _native.add_fp32(POOL, grad.data_ptr(), grad.data_ptr() + 1, 1)


# sums


def partials_of(values: np.ndarray, dtype: str, pool=POOL, isa: str = "auto", granule: int = 2048):
    partials = np.full(-(-values.size // granule), -1.0)
    _native.sum_of_squares(pool, address(values), dtype, values.size, address(partials), granule, isa)
    return partials


@given(count=st.integers(0, 10_000), seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-40, 1, 1e37]))
@settings(deadline=None, max_examples=50)
def test_sum_of_squares_matches_numpy(count, seed, scale):
    values = (np.random.default_rng(seed).standard_normal(count) * scale).astype(np.float32)
    partials = partials_of(values, "float32")
    for i, partial in enumerate(partials):
        expected = math.fsum(values[i * 2048 : (i + 1) * 2048].astype(np.float64) ** 2)
        # 128 additions per lane and four levels of the tree, each within half an ulp of a positive sum.
        assert abs(partial - expected) <= 132 * 2.0**-53 * expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_partials_do_not_depend_on_chunks_threads_or_instruction_set(dtype):
    values = np.random.default_rng(5).standard_normal(100_001).astype(np.float32)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    expected = partials_of(values, dtype)
    as_fp32 = widened(values) if dtype == "bfloat16" else values
    assert math.fsum(expected) == pytest.approx(np.square(as_fp32.astype(np.float64)).sum(), rel=1e-12)
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            pool = _native.ThreadPool(num_threads)
            assert np.array_equal(partials_of(values, dtype, pool, isa), expected)
            pool.close()
        for chunk in (2048, 6144, 40960):
            cut = [values[i : i + chunk] for i in range(0, values.size, chunk)]
            assert np.array_equal(np.concatenate([partials_of(c, dtype, isa=isa) for c in cut]), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_value_shows_in_its_partial_only(isa, bad):
    values = np.full(5000, 3e38, np.float32)
    values[4999] = bad
    partials = partials_of(values, "float32", isa=isa)
    assert np.isfinite(partials[:2]).all() and not np.isfinite(partials[2])


@pytest.mark.parametrize("isa", ISAS)
def test_add_fp32_adds_in_place(isa):
    generator = np.random.default_rng(6)
    for count in (0, 1, 17, 70_001):
        left, right = generator.standard_normal((2, count)).astype(np.float32)
        expected = left + right
        _native.add_fp32(POOL, address(left), address(right), count, isa)
        assert np.array_equal(left, expected)


# CRC32C


def crc32c_bitwise(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


CRC_FUNCTIONS = pytest.mark.parametrize("crc32c", [_native.crc32c, _native.crc32c_portable])


@CRC_FUNCTIONS
def test_crc32c_check_value(crc32c):
    data = np.frombuffer(b"123456789", np.uint8)
    assert crc32c(address(data), 9) == 0xE3069283
    assert crc32c(address(data), 0) == 0


@CRC_FUNCTIONS
@given(offset=st.integers(0, 63), nbytes=st.integers(0, 3000), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_crc32c_matches_the_bitwise_reference(crc32c, offset, nbytes, seed):
    data = np.random.default_rng(7).integers(0, 256, 3100, dtype=np.uint8)
    expected = crc32c_bitwise(data[offset : offset + nbytes].tobytes(), seed)
    assert crc32c(address(data) + offset, nbytes, seed) == expected


@given(nbytes=st.integers(24_000, 100_000), cut=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_crc32c_of_long_data_agrees_however_it_is_computed(nbytes, cut):
    data = np.random.default_rng(8).integers(0, 256, nbytes, dtype=np.uint8)
    first = int(cut * nbytes)
    whole = _native.crc32c(address(data), nbytes)
    assert whole == _native.crc32c_portable(address(data), nbytes)
    crc1 = _native.crc32c(address(data), first)
    crc2 = _native.crc32c(address(data) + first, nbytes - first)
    assert _native.crc32c(address(data) + first, nbytes - first, crc1) == whole
    assert _native.crc32c_combine(crc1, crc2, nbytes - first) == whole


def test_crc32c_combines_lengths_beyond_32_bits():
    # Zeros after A: combining twice with half the length is combining once with the whole.
    half, zeros = 2**40 + 12345, 0x00000000
    once = _native.crc32c_combine(0x12345678, zeros, 2 * half)
    twice = _native.crc32c_combine(_native.crc32c_combine(0x12345678, zeros, half), zeros, half)
    assert once == twice != _native.crc32c_combine(0x12345678, zeros, (2 * half) % 2**32)


# the pool


def test_python_threads_may_share_a_pool():
    pool = _native.ThreadPool(3)
    totals = np.zeros((4, 200_000), np.float32)
    ones = np.ones(200_000, np.float32)

    def add_often(row: np.ndarray) -> None:
        for _ in range(50):
            _native.add_fp32(pool, address(row), address(ones), row.size)

    threads = [threading.Thread(target=add_often, args=(row,)) for row in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (totals == 50).all()


def test_closed_pool_is_refused():
    pool = _native.ThreadPool(2)
    pool.close()
    pool.close()
    values = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="thread pool is closed"):
        _native.add_fp32(pool, address(values), address(values), 4)


def affinity_of_pool(cpus: list[int]) -> list[list[int]]:
    """CPUs on which each thread of a pool may run; fails if one is left when it was closed."""
    before = set(os.listdir("/proc/self/task"))
    pool = _native.ThreadPool(len(cpus), cpus)
    found = [sorted(os.sched_getaffinity(int(task))) for task in set(os.listdir("/proc/self/task")) - before]
    pool.close()
    require_threads(at_most=len(before))
    return sorted(found)


def test_pool_pins_its_threads():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    # By itself: other tests leave threads that come and go.
    assert child.call("test_kernels", "affinity_of_pool", cpus) == [[cpu] for cpu in cpus]


def test_impossible_pool_is_refused():
    with pytest.raises(ValueError, match="num_threads is 0"):
        _native.ThreadPool(0)
    with pytest.raises(ValueError, match="cpus names 1 CPUs for 2 threads"):
        _native.ThreadPool(2, [0])
    with pytest.raises(ValueError, match="cannot pin a thread to CPU 1000"):
        _native.ThreadPool(1, [1000])
