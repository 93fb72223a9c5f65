"""The search for alpha and slots, on functions whose least is known."""

from __future__ import annotations

import math

import pytest

from greedysnake.planning.solve import ALPHAS, Choice, solve

START = Choice(alpha=0.25, updates=6, staging=6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("updates", [4, 24, 256])
def test_the_least_of_a_bowl_is_found(alpha: float, updates: int) -> None:
    def step_s(choice: Choice) -> float:
        return 1.0 + abs(choice.alpha - alpha) + abs(math.log(choice.updates / updates)) + 0.1 * (choice.staging != 12)

    assert solve(step_s, START) == Choice(alpha, updates, 12)


def test_what_does_not_fit_is_not_chosen() -> None:
    def step_s(choice: Choice) -> float:
        return math.inf if choice.updates > 16 else 10.0 / choice.updates

    assert solve(step_s, START).updates == 16


def test_a_choice_stays_where_nothing_is_gained() -> None:
    odd = Choice(alpha=0.22, updates=7, staging=5)
    assert solve(lambda choice: 1.0 + 1e-4 * choice.updates, odd) == odd


def test_alpha_stays_where_it_means_nothing() -> None:
    assert solve(lambda choice: 1.0 + choice.alpha, START, vary_alpha=False) == START


def test_a_step_that_cannot_be_beaten_ends_the_search() -> None:
    tried = []

    def step_s(choice: Choice) -> float:
        tried.append(choice)
        return 5.0

    assert solve(step_s, START, least_s=5.0) == START
    assert tried == [START]


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_a_search_among_what_does_not_fit_ends(seconds: float) -> None:
    assert solve(lambda choice: seconds, START) == START
