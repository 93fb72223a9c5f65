"""Moments stored as float32, bfloat16 and int8: the kernels against numpy, and what each kind promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake import _native
from greedysnake.runtime.moments import decode, encode
from greedysnake.runtime.optimizer import (
    AdamW,
    Fp32Chunk,
    Gradient,
    Moments,
    SplitChunk,
    update_fp32,
    update_split,
)
from greedysnake.shapes import MOMENT_GROUP as GROUP
from moment_states import EXP_AVG_SQ_STEPS, EXP_AVG_STEPS, POOL, STORED, Reference, State

ISAS = _native.available_isas()
THREE = _native.ThreadPool(3)


def random_grad(count: int, generator: np.random.Generator) -> np.ndarray:
    """Groups of all sizes from denormal to huge, spread over many binades inside, with zeros among them; some groups
    hold one size, some all, some nothing."""
    scales = np.array([0, 1e-43, 1e-38, 1e-20, 1e-8, 1, 1, 1, 1e15, 1e30], np.float64)
    of_group = generator.choice(scales, -(-count // GROUP)).repeat(GROUP)[:count]
    mixed = (np.arange(count) // GROUP) % 5 == 4
    sizes = np.where(mixed, generator.choice(scales, count), of_group)
    spread = 2.0 ** generator.uniform(-12, 0, count)
    grad = sizes * spread * generator.standard_normal(count)
    grad[generator.random(count) < 0.1] = 0
    return grad.astype(np.float32)


def as_bf16(grad: np.ndarray) -> np.ndarray:
    return (grad.view(np.uint32) >> 16).astype(np.uint16)


KINDS = pytest.mark.parametrize("kind", list(STORED))
COMPACT = pytest.mark.parametrize("kind", ["bfloat16", "int8"])
SPLITS = pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
GRAD_DTYPES = pytest.mark.parametrize("bf16_grad", [False, True], ids=["fp32-grad", "bf16-grad"])


@KINDS
@SPLITS
@GRAD_DTYPES
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.3), (0.99, 0.99)])
def test_steps_match_numpy_to_the_bit(kind, split, bf16_grad, betas):
    generator = np.random.default_rng(1)
    # Three blocks of the pool, and for the kinds that have them a tail.
    count = 2 * 32768 + 5 * GROUP + (0 if kind == "int8" else 13)
    cut = 301 * GROUP if kind == "int8" else 301 * GROUP + 5
    start = generator.standard_normal(count).astype(np.float32)
    optimizer = AdamW(lr=1e-2, betas=betas)
    ways = [(isa, pool, cuts) for isa in ISAS for pool in (POOL, THREE) for cuts in ([0, count], [0, cut, count])]
    states = [State(kind, start, split=split, first=2**32 - 1000, seed=77) for _ in ways]
    reference = Reference(states[0])
    for step in range(1, 5):
        grad = random_grad(count, generator)
        grad = as_bf16(grad) if bf16_grad else grad
        reference.update(optimizer, grad, step=step, grad_scale=0.37)
        expected = reference.bits()
        for state, (isa, pool, cuts) in zip(states, ways, strict=True):
            for begin, end in itertools.pairwise(cuts):
                state.update(optimizer, grad, begin, end, step=step, grad_scale=0.37, isa=isa, pool=pool)
            found = state.bits()
            for name in expected:
                assert found[name] == expected[name], (name, step, isa, pool.num_threads, cuts)


@KINDS
@given(
    groups=st.integers(1, 6),
    rest=st.integers(0, GROUP - 1),
    first=st.integers(0, 2**40),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 2**40),
    betas=st.sampled_from([(0.9, 0.999), (0.2, 0.95), (0.95, 0.1), (0.0, 0.0)]),
    hostile=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_any_stored_bytes_step_alike_everywhere(kind, groups, rest, first, seed, step, betas, hostile):
    generator = np.random.default_rng(seed)
    count = groups * GROUP + (0 if kind == "int8" else rest)
    start = generator.standard_normal(count).astype(np.float32)
    grad = random_grad(count, generator)
    if hostile:
        grad[generator.random(count) < 0.01] = generator.choice([math.inf, -math.inf, math.nan, 3e38])
    states = [State(kind, start, first=first, seed=seed) for _ in ISAS]
    # Whatever the bytes are: NaNs with payloads, infinities, codes and scales that no kernel writes.
    moments = generator.integers(0, 256, states[0].exp_avg.nbytes * 2, dtype=np.uint8).view(STORED[kind])
    scales = (10.0 ** generator.uniform(-30, 30, states[0].scales.shape)).astype(np.float32)
    if hostile:
        scales[generator.random(scales.shape) < 0.1] = generator.choice([0, math.nan, math.inf])
    for state in states:
        state.exp_avg[:], state.exp_avg_sq[:] = moments[:count], moments[count:]
        state.scales[:] = scales
    reference = Reference(states[0])
    optimizer = AdamW(lr=1e-2, betas=betas)
    reference.update(optimizer, grad, step=step)
    for state, isa in zip(states, ISAS, strict=True):
        state.update(optimizer, grad, step=step, isa=isa)
        assert state.bits() == reference.bits(), isa


def test_split_and_fp32_weights_keep_the_same_moments():
    generator = np.random.default_rng(2)
    start = generator.standard_normal(20 * GROUP).astype(np.float32)
    for kind in STORED:
        split, fp32 = State(kind, start, split=True), State(kind, start)
        for step in range(1, 6):
            grad = random_grad(start.size, generator)
            split.update(AdamW(lr=1e-2), grad, step=step)
            fp32.update(AdamW(lr=1e-2), grad, step=step)
        assert split.bits() == fp32.bits()


# decode


BETA_THAT_KEEPS = 1 - 2.0**-52
"""Its rate vanishes beside any moment, and its corrections are powers of two: the step below divides exactly."""


def weight_after_nothing(state: State, isa: str, eps: float) -> np.ndarray:
    """What a step with a zero gradient makes of weights of 0: -m / (sqrt(v) + eps)."""
    optimizer = AdamW(lr=2.0**-26, betas=(BETA_THAT_KEEPS, BETA_THAT_KEEPS), eps=eps * 2.0**26, weight_decay=0)
    state.update(optimizer, np.zeros(state.count, np.float32), step=1, isa=isa)
    return state.weight


def every_code(kind: str, scale: float) -> State:
    """Every stored value of either moment that kernels write and that a division can show: finite, and no v of 0."""
    if kind == "int8":
        codes = np.arange(256, dtype=np.uint8)[np.arange(256) != 128]
        # The largest code in each group, as kernels leave it.
        groups = [np.append(codes[i : i + 63], 127) for i in range(0, codes.size, 63)]
        roots = [np.append(np.arange(i, i + 63) % 256, 255) for i in range(0, codes.size, 63)]
        groups[-1] = np.pad(groups[-1], (GROUP - groups[-1].size, 0))
        state = State(kind, np.zeros(GROUP * len(groups), np.float32))
        state.exp_avg[:], state.exp_avg_sq[:] = np.concatenate(groups), np.concatenate(roots).astype(np.uint8)
        state.scales[:] = scale
        return state
    values = np.arange(2**16, dtype=np.uint32) << 16 if kind == "bfloat16" else np.arange(2**16) * 65521 + 1
    values = values.astype(np.uint32)
    values = values[np.isfinite(values.view(np.float32)) & (values != 0x80000000)]
    state = State(kind, np.zeros(values.size, np.float32))
    positive = np.maximum(values & 0x7FFFFFFF, 0x00800000)
    shift = 16 if kind == "bfloat16" else 0
    state.exp_avg[:], state.exp_avg_sq[:] = values >> shift, positive >> shift
    return state


@KINDS
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [1.0, 3e-7, 1.7e15])
def test_decode_gives_what_the_kernel_goes_on_with(kind, isa, scale):
    state = every_code(kind, scale)
    before, (exp_avg, _) = state.bits(), state.decoded()
    # Without v the weight shows exp_avg itself.
    state.exp_avg_sq[:], state.scales[1] = 0, 0
    shown = weight_after_nothing(state, isa, eps=1.0)
    assert np.array_equal(-shown, exp_avg)
    state = every_code(kind, scale)
    _, exp_avg_sq = state.decoded()
    state.exp_avg[:] = {"float32": 0x3F800000, "bfloat16": 0x3F80, "int8": 127}[kind]
    state.scales[0] = 1
    shown = weight_after_nothing(state, isa, eps=0.0)
    assert np.array_equal(-shown, 1 / np.sqrt(exp_avg_sq))
    # And what was decoded is encoded to what it was.
    state = every_code(kind, scale)
    weight_after_nothing(state, isa, eps=1.0)
    assert {**state.bits(), "master": b""} == {**before, "master": b""}


def test_decode_names_an_unknown_kind():
    with pytest.raises(ValueError, match='moments "fp8" are not known: use "float32", "bfloat16" or "int8"'):
        decode("fp8", State("float32", np.zeros(0, np.float32)).vectors())


# encode, which is for moments that change their kind


def encoded(kind: str, exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> State:
    state = State(kind, np.zeros(exp_avg.size, np.float32))
    encode(kind, torch.from_numpy(exp_avg), torch.from_numpy(exp_avg_sq), state.vectors())
    return state


@KINDS
@pytest.mark.parametrize("scale", [1.0, 3e-7, 1.7e15])
def test_what_was_decoded_is_encoded_to_what_it_was(kind, scale):
    state = every_code(kind, scale)
    again = encoded(kind, *state.decoded())
    assert {**again.bits(), "master": b""} == {**state.bits(), "master": b""}


@pytest.mark.parametrize("seed", range(5))
def test_bfloat16_is_encoded_as_torch_rounds(seed):
    moments = random_grad(2 * 100 * GROUP, np.random.default_rng(seed)).reshape(2, -1)
    moments[1] = np.abs(moments[1])
    for found, moment in zip(encoded("bfloat16", *moments).decoded(), moments, strict=True):
        assert np.array_equal(found, torch.from_numpy(moment).bfloat16().float().numpy())


@pytest.mark.parametrize("seed", range(5))
def test_int8_is_encoded_to_the_nearest_code(seed):
    moments = random_grad(2 * 100 * GROUP, np.random.default_rng(seed)).reshape(2, -1, GROUP)
    moments[1] = np.abs(moments[1])
    found = encoded("int8", *moments.reshape(2, -1)).decoded()
    for moment, near, steps in zip(moments, found, (EXP_AVG_STEPS, EXP_AVG_SQ_STEPS), strict=True):
        size = np.abs(moment).astype(np.float64)
        largest = size.max(axis=1, keepdims=True)
        near = near.reshape(size.shape)
        assert (near * moment >= 0).all()
        off = np.abs(np.abs(near).astype(np.float64) - size)
        least = np.abs(steps * largest[..., None] - size[..., None]).min(axis=2)
        # fp32 rounds what a code stands for; and the first moment's lowest code, which is 2^-16 and an eighth, is zero.
        tolerance = 2.0**-23 * (np.abs(near) + size) + 2.0**-149 + (steps is EXP_AVG_STEPS) * steps[0] * largest
        assert (off <= least + tolerance).all()


@COMPACT
def test_encode_keeps_zeros_signs_and_what_is_not_finite(kind):
    exp_avg, exp_avg_sq = np.zeros((2, 4 * GROUP), np.float32)
    exp_avg[GROUP : GROUP + 4] = [1, -1, 1e-20, -1e-20]
    exp_avg_sq[GROUP] = 1
    exp_avg[2 * GROUP], exp_avg_sq[2 * GROUP + 1] = np.inf, np.nan
    exp_avg[3 * GROUP], exp_avg_sq[3 * GROUP] = -3.4e38, 3.4e38
    state = encoded(kind, exp_avg, exp_avg_sq)
    assert not any(part[:GROUP].any() for part in (state.exp_avg, state.exp_avg_sq))
    found, found_sq = state.decoded()
    assert found[GROUP] == 1 and found[GROUP + 1] == -1 and found_sq[GROUP] == 1
    if kind == "int8":
        assert not state.exp_avg[GROUP + 2 : 2 * GROUP].any()  # a zero has no sign
        assert (found_sq[GROUP : 2 * GROUP] > 0).all()  # it is divided by its root
        assert np.isnan(found[2 * GROUP : 3 * GROUP]).all() and np.isnan(found_sq[2 * GROUP : 3 * GROUP]).all()
    else:
        assert np.isinf(found[2 * GROUP]) and np.isnan(found_sq[2 * GROUP + 1])
    assert np.isfinite(found[3 * GROUP :]).all() and np.isfinite(found_sq[3 * GROUP :]).all()


def test_encode_names_an_unknown_kind():
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match='moments "fp8" are not known: use "float32", "bfloat16" or "int8"'):
        encode("fp8", nothing, nothing, {})


# bfloat16: rounding by chance

FORGET = AdamW(lr=0.0, betas=(0.0, 0.0))
"""exp_avg becomes the gradient and exp_avg_sq its square, exactly: what is stored is the rounding alone."""

SIGMAS = 5
"""A check against chance fails for one seed of two million; the seeds are fixed."""


def went_up(value: float, *, seeds, steps, numbers) -> tuple[np.ndarray, np.ndarray]:
    """Which of the stored moments were rounded away from zero, of (seed, step, number of the parameter)."""
    grad = np.full(len(numbers), value, np.float32)
    ups: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for seed in seeds:
        for step in steps:
            state = State("bfloat16", np.zeros_like(grad), first=numbers[0], seed=seed)
            state.update(FORGET, grad, step=step)
            for up, stored, fresh in zip(ups, (state.exp_avg, state.exp_avg_sq), (grad, grad * grad), strict=True):
                lower = fresh.view(np.uint32) >> 16
                assert ((stored == lower) | (stored == lower + 1)).all()
                up.append(stored != lower)
    return np.concatenate(ups[0]), np.concatenate(ups[1])


def fraction_above(value: float) -> float:
    return (np.float32(value).view(np.uint32) & 0xFFFF) / 2**16


@pytest.mark.parametrize("value", [1.001, -0.3333, 7.77e-9, 5e15, 1.2345e-18])
@pytest.mark.parametrize(
    "axes",
    [
        {"seeds": [3], "steps": [1], "numbers": range(100_000)},
        {"seeds": range(3000), "steps": [1], "numbers": [5]},
        {"seeds": [3], "steps": range(1, 3001), "numbers": [5]},
        {"seeds": range(10), "steps": range(1, 11), "numbers": range(2**31, 2**31 + 500)},
    ],
    ids=["parameters", "seeds", "steps", "all"],
)
def test_rounding_by_chance_has_the_value_as_its_mean(value, axes):
    fractions = fraction_above(value), fraction_above(np.float32(value) * np.float32(value))
    for up, fraction in zip(went_up(value, **axes), fractions, strict=True):
        sigma = math.sqrt(fraction * (1 - fraction) / up.size)
        assert abs(up.mean() - fraction) <= SIGMAS * sigma


def test_roundings_do_not_follow_each_other():
    value = 1.00390625 + 2**-9  # halfway: as uncertain as can be
    up, up_sq = went_up(value, seeds=[1], steps=[1], numbers=range(200_000))
    later, _ = went_up(value, seeds=[1], steps=[2], numbers=range(200_000))
    other, _ = went_up(value, seeds=[2], steps=[1], numbers=range(200_000))
    pairs = [(up, up_sq), (up, later), (up, other), *((up[:-lag], up[lag:]) for lag in (1, 2, 16, 64, 4096))]
    for left, right in pairs:
        # Correlation of independent series: mean 0, deviation 1 / sqrt(n).
        assert abs(np.corrcoef(left, right)[0, 1]) < SIGMAS / math.sqrt(left.size)


@pytest.mark.parametrize("start", [1.0, 1.5, 3e-9])
def test_exp_avg_sq_decays_on_average_where_rounding_to_nearest_freezes(start):
    count, num_steps = 4096, 1000
    optimizer = AdamW(lr=0.0)
    state = State("bfloat16", np.zeros(count, np.float32), seed=9)
    state.exp_avg_sq[:] = np.float32(start).view(np.uint32) >> 16
    start = float(state.decoded()[1][0])
    zeros = np.zeros(count, np.float32)
    for step in range(1, num_steps + 1):
        state.update(optimizer, zeros, step=step)
    mean = state.decoded()[1].astype(np.float64).mean() / start
    # A step moves a value by one place, 2^-7 of it at most, or not: a deviation of 2^-8 at most, over all steps
    # sqrt(1000) of it, of the mean of 4096 values a 64th. The rate 0.001 in fp32 and each step's fp32 rounding: 1e-4.
    bound = SIGMAS * math.sqrt(num_steps) * 2**-8 / math.sqrt(count) + 1e-4
    assert abs(mean / 0.999**num_steps - 1) < bound < 0.01
    nearest = torch.tensor(start).bfloat16()
    for _ in range(num_steps):
        nearest = (nearest.float() * 0.999).bfloat16()
    assert nearest.item() == start


def test_int8_exp_avg_sq_decays_on_average_beside_one_that_does_not():
    count, num_steps = 64 * GROUP, 1000
    state = State("int8", np.zeros(count, np.float32), seed=9)
    grad = np.zeros(count, np.float32)
    grad[::GROUP] = 1.0  # holds the scale of its group where it is
    rest = grad == 0
    state.exp_avg_sq[:], state.scales[1] = 255, 1.0
    state.exp_avg_sq[rest] = 247  # a half
    for step in range(1, num_steps + 1):
        state.update(AdamW(lr=0.0), grad, step=step)
    found = state.decoded()[1].astype(np.float64)
    assert np.allclose(found[~rest], 1.0, rtol=1e-4)
    # A step of an eighth at most, with a probability of 0.001 over it: a deviation of sqrt(0.001 / 8) a step, over all
    # steps sqrt(1000) of that, of the mean of 4032 values a 63rd.
    bound = SIGMAS * math.sqrt(num_steps * 0.001 / 8) / math.sqrt(rest.sum())
    assert abs(found[rest].mean() / (0.5 * 0.999**num_steps) - 1) < bound < 0.03


@pytest.mark.parametrize("beta1", [0.9, 15 / 16, 0.95, 0.99])
def test_int8_exp_avg_decays_to_zero_beside_one_that_does_not(beta1):
    """Else it would push its weight on and on, by more and more while exp_avg_sq decays."""
    state = State("int8", np.zeros(127 * GROUP, np.float32), seed=9)
    grad = np.zeros(state.count, np.float32)
    grad[::GROUP] = 1.0  # holds the scale of its group where it is
    state.exp_avg[:] = np.arange(1, 128).repeat(GROUP)
    state.exp_avg[::GROUP], state.scales[:] = 127, 1.0
    # 32 / (1 - beta1) steps are a decay to e^-32, and what has a code reaches down to e^-11.
    for step in range(1, round(32 / (1 - beta1))):
        state.update(AdamW(lr=0.0, betas=(beta1, 0.999)), grad, step=step)
    found = state.decoded()[0]
    assert np.allclose(found[::GROUP], 1.0, rtol=1e-4) and not found[grad == 0].any()


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_by_chance_makes_no_infinity(isa):
    values = (np.arange(0x7F7E0000, 0x7F800000, dtype=np.uint32)).view(np.float32)
    for sign in (1, -1):
        state = State("bfloat16", np.zeros_like(values))
        state.update(AdamW(lr=0.0, betas=(0.0, 0.999)), sign * values, step=1, isa=isa)
        assert ((state.exp_avg & 0x7FFF) <= 0x7F7F).all()
        # The squares overflow to the largest fp32, which is above the largest bf16.
        assert (state.exp_avg_sq == 0x7F7F).all()
    state.exp_avg[:] = 0
    state.update(AdamW(lr=0.0), np.full_like(values, -math.inf), step=1, isa=isa)
    assert (state.exp_avg == 0xFF80).all()
    state.update(AdamW(lr=0.0), np.full_like(values, math.nan), step=2, isa=isa)
    assert (state.exp_avg == 0x7FC0).all() and (state.exp_avg_sq == 0x7FC0).all()


# int8: codes

STEP = 2.0**-3 * (1 + 1e-6)
"""An eighth of a binade, relative to its lower end; the rest is for three fp32 roundings."""


TINY = 2.0**-148
"""Two of the smallest fp32: what products that are hardly there may be off by."""


@given(seed=st.integers(0, 2**32 - 1), size=st.floats(-15, 15), binades=st.floats(0, 40))
@settings(deadline=None, max_examples=100)
def test_codes_are_next_to_the_value(seed, size, binades):
    generator = np.random.default_rng(seed)
    count = 4 * GROUP
    grad = 10.0**size * 2.0 ** generator.uniform(-binades, 0, count) * generator.choice([-1, 1], count)
    grad = grad.astype(np.float32)
    state = State("int8", np.zeros(count, np.float32))
    state.update(FORGET, grad, step=1)
    exp_avg, exp_avg_sq = (moment.astype(np.float64) for moment in state.decoded())
    exact, largest = grad.astype(np.float64), np.abs(grad).reshape(-1, GROUP).max(axis=1).repeat(GROUP)
    coded = np.abs(exact) >= 1.25 * 2.0**-16 * largest
    # Rounded by chance: to the code below or above, an eighth apart.
    assert (np.abs(exp_avg - exact) <= STEP * np.abs(exact))[coded].all()
    assert (np.abs(exp_avg - exact) <= 1.25 * 2.0**-16 * largest)[~coded].all()
    squares, smallest = exact**2, 1.125 * 2.0**-32 * largest.astype(np.float64) ** 2
    coded = squares >= smallest
    assert (np.abs(exp_avg_sq - squares) <= STEP * squares + TINY)[coded].all()
    # Below the smallest code it is rounded up to that, never down.
    assert np.allclose(exp_avg_sq[~coded], smallest[~coded], rtol=1e-6, atol=TINY)
    # The largest of a group is kept to the last bit, so a group that only decays does so exactly.
    tops = np.abs(exact) == largest
    assert np.array_equal(np.abs(exp_avg)[tops], largest[tops].astype(np.float64))


def adversarial_grads(style: str, generator: np.random.Generator, num_steps: int) -> np.ndarray:
    """Gradients from 1e-6 to 1e6 that try to leave a large exp_avg beside a small exp_avg_sq."""
    shape = (num_steps, GROUP)
    signs = generator.choice([-1.0, 1.0], GROUP)
    if style == "bursts":  # silence, then the largest, then the smallest
        sizes = generator.choice([0, 0, 0, 1e-6, 1e6], shape)
    elif style == "growing":
        sizes = 10.0 ** (np.linspace(-6, 6, num_steps)[:, None] * generator.uniform(0, 1, GROUP))
    elif style == "shrinking":
        sizes = 10.0 ** (np.linspace(6, -6, num_steps)[:, None] * generator.uniform(0, 1, GROUP))
    elif style == "one giant":  # which hides everybody else under its scale, and then is gone
        sizes = 10.0 ** generator.uniform(-6, 0, shape)
        sizes[:, 0] = np.where(np.arange(num_steps) < num_steps // 2, 1e6, 0)
    else:
        sizes = 10.0 ** generator.uniform(-6, 6, shape)
    return (signs * sizes).astype(np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    style=st.sampled_from(["bursts", "growing", "shrinking", "one giant", "noise"]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95)]),
)
@settings(deadline=None, max_examples=60)
def test_exp_avg_over_the_root_stays_bounded(seed, style, betas):
    # By Cauchy-Schwarz m^2 / v is at most the sum of ((1 - beta1) beta1^k)^2 / ((1 - beta2) beta2^k) over the gradients
    # k steps ago: 7.3^2 for (0.9, 0.999) if nothing is rounded. A rounding changes a moment by an eighth at most, up as
    # often as down, and is remembered for about ten steps: five deviations of that are less than a factor of e.
    beta1, beta2 = betas
    bound = math.e * math.sqrt((1 - beta1) ** 2 / (1 - beta2) / (1 - beta1**2 / beta2))
    num_steps = 40
    generator = np.random.default_rng(seed)
    optimizer = AdamW(lr=1.0, betas=betas, eps=1e-30, weight_decay=0.0)
    state = State("int8", np.zeros(GROUP, np.float32))
    for step, grad in enumerate(adversarial_grads(style, generator, num_steps), 1):
        state.weight[:] = 0
        state.update(optimizer, grad, step=step)
        exp_avg, exp_avg_sq = state.decoded()
        if state.scales[1, 0] > 0:
            assert (exp_avg_sq > 0).all()
        assert (np.abs(exp_avg) <= bound * np.sqrt(exp_avg_sq)).all()
        correction = (1 - betas[0] ** step) / math.sqrt(1 - betas[1] ** step)
        assert (np.abs(state.weight) * correction <= bound).all()


def test_exp_avg_sq_is_never_zero_beside_one_that_is_not():
    # Down to those whose 2^-32nd part is still an fp32.
    for largest in (1e-16, 1e-8, 1.0, 1e8, 1e15):
        grad = np.zeros(GROUP, np.float32)
        grad[17] = largest
        state = State("int8", np.zeros(GROUP, np.float32))
        state.update(AdamW(lr=1e-3), grad, step=1)
        assert (state.decoded()[1] > 0).all()
    state = State("int8", np.zeros(GROUP, np.float32))
    state.update(AdamW(lr=1e-3), np.zeros(GROUP, np.float32), step=1)
    assert not state.decoded()[1].any() and not state.exp_avg.any() and not state.weight.any()


def test_zero_has_one_byte():
    grad = np.zeros(GROUP, np.float32)
    grad[0], grad[1], grad[2], grad[3] = 1.0, -1e-6, -0.0, -1.0
    state = State("int8", np.zeros(GROUP, np.float32))
    state.update(FORGET, grad, step=1)
    assert state.exp_avg[:4].tolist() == [127, 0, 0, 255]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradient_that_is_not_finite_spoils_its_own_group(isa, bad):
    generator = np.random.default_rng(4)
    grad = generator.standard_normal(3 * GROUP).astype(np.float32)
    grad[GROUP + 5] = bad
    state, reference = (State("int8", np.ones(3 * GROUP, np.float32)) for _ in range(2))
    state.update(AdamW(lr=1e-3), grad, step=1, isa=isa)
    # exp_avg of the bad one is not finite; exp_avg_sq of an infinite gradient is the largest fp32.
    assert state.scales.view(np.uint32)[0, 1] == 0x7FC00000
    assert np.isnan(state.decoded()[0][GROUP : 2 * GROUP]).all()
    reference.update(AdamW(lr=1e-3), np.where(np.isfinite(grad), grad, np.float32(0)), step=1, isa=isa)
    for part in (slice(0, GROUP), slice(2 * GROUP, None)):
        for found, expected in zip(state.decoded(), reference.decoded(), strict=True):
            assert np.array_equal(found[part], expected[part])


@COMPACT
@SPLITS
def test_bits_after_gradients_that_are_not_finite_are_the_same_everywhere(kind, split):
    expected = None
    for isa in ISAS:
        for pool in (POOL, THREE):
            generator = np.random.default_rng(5)
            state = State(kind, np.ones(40_000 // GROUP * GROUP, np.float32), split=split)
            for step in range(1, 4):
                grad = random_grad(state.count, generator)
                grad[::311], grad[1::433], grad[2::557], grad[3::601] = math.inf, -math.inf, math.nan, 3e38
                state.update(AdamW(lr=1e-2), grad, step=step, isa=isa, pool=pool)
            expected = expected or state.bits()
            assert state.bits() == expected, (isa, pool.num_threads)


# refusals


def test_wrong_moments_are_named():
    state, grad = State("int8", np.zeros(2 * GROUP, np.float32)), np.zeros(2 * GROUP, np.float32)
    with pytest.raises(ValueError, match="count is 100: int8 moments come in groups of 64, give a multiple of that"):
        state.update(AdamW(lr=1.0), grad, 0, 100, step=1)
    address, scale = state.exp_avg.ctypes.data, state.scales.ctypes.data
    gradient = Gradient(grad.ctypes.data, "float32", grad.size)
    for moments, message in (
        (Moments(address, address, "fp8"), 'moments "fp8" are not known: use "float32", "bfloat16" or "int8"'),
        (Moments(address, address, "int8"), "exp_avg_scale is a null address"),
        (Moments(address, address, "int8", scale), "exp_avg_sq_scale is a null address"),
        (Moments(address, address, "int8", scale + 1, scale), "exp_avg_scale is at .* not a multiple of 4"),
        (Moments(address, 0, "int8", scale, scale), "exp_avg_sq is a null address"),
        (Moments(address + 1, address, "bfloat16"), "exp_avg is at .* not a multiple of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            update_fp32(POOL, AdamW(lr=1.0), Fp32Chunk(grad.ctypes.data, moments, grad.size), gradient, step=1)
    chunk = SplitChunk(grad.ctypes.data, 0, Moments(address, address, "bfloat16"), grad.size)
    with pytest.raises(ValueError, match="residual is a null address"):
        update_split(POOL, AdamW(lr=1.0), chunk, gradient, step=1)
