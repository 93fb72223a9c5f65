"""Rates against transformers' own schedules, for every step of random trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import optimization

from greedysnake.errors import ConfigError
from greedysnake.learning_rate import DecayShape, LearningRate, ScheduleName

PEAK = 3e-4


def rates_of(make: Callable[[torch.optim.Optimizer], Any], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int]:
    """Steps of a training, of its warm-up and of its decay."""
    num_steps = draw(st.integers(1, 60))
    num_warmup = draw(st.integers(0, num_steps))
    return num_steps, num_warmup, draw(st.integers(0, num_steps - num_warmup))


def theirs(name: str, steps: int, warmup: int, decay: int, shape: str, low: float) -> list[float]:
    makers: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "constant": optimization.get_constant_schedule,
        "constant_with_warmup": lambda o: optimization.get_constant_schedule_with_warmup(o, warmup),
        "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, warmup, steps),
        "cosine": lambda o: optimization.get_cosine_schedule_with_warmup(o, warmup, steps),
        "cosine_with_min_lr": lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            o, warmup, steps, min_lr_rate=low
        ),
        "warmup_stable_decay": lambda o: optimization.get_wsd_schedule(
            o, warmup, decay, num_training_steps=steps, decay_type=shape, min_lr_ratio=low
        ),
    }
    return rates_of(makers[name], steps)


@pytest.mark.parametrize("name", [name for name in get_args(ScheduleName) if name != "wsd"])
@settings(max_examples=30, deadline=None)
@given(lengths=lengths(), shape=st.sampled_from(get_args(DecayShape)), low=st.sampled_from([0.0, 0.1, 1.0]))
def test_every_rate_is_that_of_transformers(name: str, lengths: tuple[int, int, int], shape: str, low: float) -> None:
    steps, warmup, decay = lengths
    is_stable, has_low = name == "warmup_stable_decay", name in ("cosine_with_min_lr", "warmup_stable_decay")
    rate = LearningRate(
        PEAK,
        name,
        steps,
        0 if name == "constant" else warmup,
        decay if is_stable else 0,
        shape,
        low if has_low else 0.0,
    )
    expected = theirs(name, steps, warmup, decay, shape, low)
    # The same formulas in float64; products may be grouped differently.
    assert [rate.at(step) for step in range(steps)] == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_wsd_is_short_for_warmup_stable_decay() -> None:
    short, long = (LearningRate(PEAK, name, 50, 5, 10, "1-sqrt", 0.1) for name in ("wsd", "warmup_stable_decay"))
    assert [short.at(step) for step in range(51)] == [long.at(step) for step in range(51)]


def test_what_does_not_fit_into_the_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps is 11 and training has 10 steps"):
        LearningRate(PEAK, "linear", 10, 11)
    with pytest.raises(ConfigError, match="num_decay_steps is 6 after 5 steps of warm-up"):
        LearningRate(PEAK, "wsd", 10, 5, 6)
    with pytest.raises(ConfigError, match="lr_scheduler_type is 'polynomial'"):
        LearningRate(PEAK, "polynomial", 10)
