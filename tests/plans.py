"""Plans of small runs, on a drive whose speed is known."""

from __future__ import annotations

from typing import Any

from greedysnake.config import load_config
from greedysnake.planner import Planned, plan_run
from greedysnake.runtime.drive import Bandwidth

Values = dict[str, Any]
FAST = Bandwidth(3e9, 4e9, 3.5e9)


def quiet(text: str) -> None:
    del text


def plan(values: Values) -> Planned:
    return plan_run(load_config(values), quiet)


def with_engine(values: Values, **engine: Any) -> Values:
    return {**values, "engine": {**values["engine"], **engine}}
