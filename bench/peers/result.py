"""What a bench has found so far, as it is written to a file."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peers.model_files import ROOT
from peers.scenarios import SCENARIOS, shares_of_limit
from peers.worker import Worker
from trimaran.compute.native.calibration import Calibration

RESULTS = ROOT / "bench" / "results"
_SAME = ("model", "threads", "requests")


class Result:
    """Figures by scenario and engine, one a repetition; the machine's calibrations.

    Attributes:
        path: the file.
        values: what it holds: "model", "threads", "requests", the arguments of the "runs",
            "calibrations", "figures" and "engines".
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def begin(cls, args: argparse.Namespace) -> Result:
        """An empty one, or that of the file `args.append`.

        Raises:
            SystemExit: the file can't be read, or what it measured isn't the same thing.
        """
        same = {name: getattr(args, name) for name in _SAME}
        run = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
        if args.append is None:
            name = f"peers-{Path(args.model).stem}-{time.strftime('%Y%m%d-%H%M%S')}.json"
            empty: dict[str, Any] = {"calibrations": [], "figures": {}, "engines": {}}
            return cls(RESULTS / name, same | {"runs": [run]} | empty)
        try:
            values = json.loads(args.append.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SystemExit(f"--append {args.append} can't be read: {error}") from None
        for name, value in same.items():
            if values.get(name) != value:
                raise SystemExit(
                    f"--append {args.append} is of {name} {values.get(name)}, and this run of "
                    f"{value}; give the same, or leave --append out"
                )
        values["runs"].append(run)
        return cls(args.append, values)

    def begin_measuring(self, workers: Iterable[Worker], calibration: Calibration) -> None:
        """Notes the engines, and the machine before."""
        for worker in workers:
            about = {"about": worker.about, "load_seconds": worker.load_seconds}
            self.values["engines"][worker.name] = about
        self.add_calibration(calibration)

    def add_calibration(self, calibration: Calibration) -> None:
        self.values["calibrations"].append(calibration.to_json())

    def add_figure(self, scenario: str, engine: str, value: float) -> None:
        rows = self.values["figures"].setdefault(scenario, {})
        rows.setdefault(engine, []).append(value)

    def write(self) -> None:
        """With the share of the limit that each engine's medians reach."""
        machine = [Calibration.from_json(values) for values in self.values["calibrations"]]
        for name, engine in self.values["engines"].items():
            engine["share_of_limit"] = self._shares(name, engine["about"], machine)
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps(self.values, indent=2, ensure_ascii=False)
        self.path.write_text(text, encoding="utf-8")

    def _shares(
        self, engine: str, about: Mapping[str, Any], machine: list[Calibration]
    ) -> dict[str, dict[str, float]]:
        # Of the best that the machine did in any calibration.
        weights = about.get("weight_bytes", 1 << 30)
        limits = {type: max(c.peak(type) for c in machine) for type in ("int8", "bf16")}
        limits["bandwidth"] = max(c.bandwidth(weights) for c in machine)
        return {
            name: shares_of_limit(
                SCENARIOS[name].at_most(self.values["requests"]),
                statistics.median(rows[engine]),
                about,
                limits,
            )
            for name, rows in self.values["figures"].items()
            if rows.get(engine)
        }
