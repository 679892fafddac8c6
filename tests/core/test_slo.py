"""SLO classes: what they cost, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trimaran.core.errors import ParameterError
from trimaran.core.slo import SLO_CLASSES, STANDARD, SloClass, slo_class


def test_a_cost_is_the_weighted_sum() -> None:
    own = SloClass("own", alpha=2.0, beta=10.0, gamma=0.5, weight=3.0)
    assert own.cost(ttft=1.0, tpot=0.1, itl=4.0) == pytest.approx(3 * (2 + 1 + 2))


def test_the_default_cost_is_the_time_of_a_hundred_tokens_and_the_longest_halt() -> None:
    assert STANDARD.cost(0.5, 0.02, 0.3) == pytest.approx(0.5 + 100 * 0.02 + 0.3)


def test_classes_by_name() -> None:
    assert slo_class("interactive") is SLO_CLASSES["interactive"]
    own = SloClass("own")
    assert slo_class(own) is own
    for bad in ("fast", 3, None):
        with pytest.raises(ParameterError, match="slo is .*interactive, standard, batch"):
            slo_class(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"ttft": 0}, {"tpot": -1.0}, {"tpot": "fast"}, {"alpha": -0.1}, {"beta": float("nan")},
        {"gamma": float("inf")}, {"weight": 0}, {"weight": 1e7}, {"weight": True},
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ParameterError, match=f"{name} of SLO class 'own' is "):
        SloClass("own", **values)
