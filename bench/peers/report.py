"""The result as JSON-able values, and as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peers.scenarios import SCENARIOS, Scenario
from trimaran.compute.native.calibration import Calibration

OURS = "trimaran"
Figures = Mapping[str, Mapping[str, Sequence[float]]]
"""Scenario -> engine -> a figure a repetition."""


def best(scenario: Scenario, rows: Mapping[str, Sequence[float]], ours: bool) -> str | None:
    """The engine with the best median: of this project's, or of the peers."""
    medians = {
        name: statistics.median(values)
        for name, values in rows.items()
        if values and name.startswith(OURS) == ours
    }
    if not medians:
        return None
    return (max if scenario.more_is_better else min)(medians, key=lambda name: medians[name])


def ratio(scenario: Scenario, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times faster, lowest to highest, by pairs of the same repetition."""
    pairs = zip(ours, theirs, strict=False)  # who takes long is measured less often
    return sorted(a / b if scenario.more_is_better else b / a for a, b in pairs)


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Medians with their spread, then the ratio to the best peer, then the calibration."""
    figures: Figures = result["figures"]
    scenarios = {s.name: s.at_most(result["requests"]) for s in SCENARIOS.values()}
    names = [name for name in scenarios if name in figures]
    yield f"Model: {result['model']}"
    yield ""
    heads = [f"{name}, {scenarios[name].unit}" for name in names]
    yield "| engine | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for engine in result["engines"]:
        yield f"| {engine} | " + " | ".join(_cell(figures[n].get(engine, ())) for n in names) + " |"
    yield f"| **times the best peer** | {' | '.join(_ratios(figures, scenarios, names))} |"
    yield ""
    for name in names:
        yield f"- {name}: {scenarios[name].title}"
    yield ""
    yield from _limits(result, names)
    yield from _calibration(result)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    digits = 1 if middle < 100 else 0
    if middle < 10:
        digits = 2
    low, high = min(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def _ratios(
    figures: Figures, scenarios: Mapping[str, Scenario], names: Sequence[str]
) -> Iterator[str]:
    for name in names:
        rows, scenario = figures[name], scenarios[name]
        ours, theirs = best(scenario, rows, True), best(scenario, rows, False)
        if ours is None or theirs is None:
            yield "–"
            continue
        ratios = ratio(scenario, rows[ours], rows[theirs])
        middle = statistics.median(ratios)
        yield f"**{middle:.1f}×** ({ratios[0]:.1f}–{ratios[-1]:.1f}, {theirs})"


def _limits(result: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    rows = [
        (engine, name, kind, share)
        for engine, about in result["engines"].items()
        for name in names
        for kind, share in about["share_of_limit"].get(name, {}).items()
    ]
    if not rows:
        return
    yield "| engine | scenario | limit | share reached |"
    yield "|---|---|---|---|"
    for engine, name, kind, share in rows:
        yield f"| {engine} | {name} | {kind} | {share:.0%} |"
    yield ""


def _calibration(result: Mapping[str, Any]) -> Iterator[str]:
    """The machine's rates with all threads, medians: the lowest and the highest calibration."""
    found: dict[str, list[float]] = {}
    for values in result["calibrations"]:
        machine = Calibration.from_json(values)
        for reading in machine.reads:
            if reading.threads == machine.threads:
                name = f"reads {reading.bytes >> 20} MiB, GB/s"
                found.setdefault(name, []).append(reading.rate.median)
        for peak in machine.peaks:
            if peak.threads == machine.threads:
                found.setdefault(f"{peak.isa} {peak.type}, GOP/s", []).append(peak.rate.median)
    yield f"| {len(result['calibrations'])} calibrations | lowest | highest |"
    yield "|---|---|---|"
    for name, rates in found.items():
        yield f"| {name} | {min(rates):,.0f} | {max(rates):,.0f} |"
