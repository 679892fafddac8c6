"""How near a step comes to the machine's limits, where its time goes, and how it grows.

    python bench/limits.py [--model smollm2-135m] [--option weights=int8 ...] [--plot FILE.svg]
                           [--repeats 7] [--longest 8192]

Three parts, all on the native back end:
    profile  decode of 1 and of 32 sequences and a prefill of 1,024 tokens, by operation, and
             the share of the limit: weights and KV read / bandwidth for decode, operations
             of the linear layers / peak of the machine for the prefill
    growth   a decode step against batch 1 to 256 (context 256), and against context 128 to
             --longest (1 and 8 sequences)
    Python   what a step of the whole engine costs beside the back end's and the sampler's
             work: schedule, pick, detokenise, against batch 1 to 256

Contexts are pages that were written once and belong to one sequence each, so that nothing is
shared. The machine is calibrated before and after. Prints tables, writes everything to
bench/results/limits-<model>-<time>.json, and with --plot the growth as one picture (which needs
matplotlib, of the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.compute.native.backend import NativeBackend
from trimaran.compute.native.calibration import Calibration, calibrate
from trimaran.core.config import EngineConfig
from trimaran.core.request import Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import StepPlan
from trimaran.engine.factory import load_engine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROWTH_CONTEXT = 256
CONTEXT_BATCHES = (1, 8)


class Steps:
    """Steps of one back end whose cache has `blocks` written pages."""

    def __init__(self, backend: NativeBackend, blocks: int, vocabulary: int, rows: int) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        backend.allocate_cache(blocks, BLOCK)
        for begin in range(0, blocks, rows):
            self._touch(np.arange(begin, min(begin + rows, blocks), dtype=np.int32))

    def _touch(self, blocks: np.ndarray) -> None:
        """Writes one token into each block: a page that never was would read as shared zeros."""
        count = len(blocks)
        self._backend.run(
            StepPlan(
                tokens=np.zeros(count, np.int32),
                positions=np.zeros(count, np.int32),
                slots=blocks * BLOCK,
                row_starts=np.arange(count + 1, dtype=np.int32),
                contexts=np.ones(count, np.int32),
                block_tables=blocks[:, None].copy(),
                logit_rows=np.zeros(1, np.int32),
            )
        )

    def decode(self, batch: int, context: int) -> StepPlan:
        """The last token of `batch` sequences of `context` tokens, each with its own pages."""
        width = -(-context // BLOCK)
        tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
        last = context - 1
        return StepPlan(
            tokens=np.arange(batch, dtype=np.int32) * 7 % self._vocabulary,
            positions=np.full(batch, last, np.int32),
            slots=tables[:, last // BLOCK] * BLOCK + last % BLOCK,
            row_starts=np.arange(batch + 1, dtype=np.int32),
            contexts=np.full(batch, context, np.int32),
            block_tables=tables,
            logit_rows=np.arange(batch, dtype=np.int32),
        )

    def prefill(self, length: int) -> StepPlan:
        """A whole prompt of which the last row samples."""
        positions = np.arange(length, dtype=np.int32)
        width = -(-length // BLOCK)
        return StepPlan(
            tokens=positions * 7 % self._vocabulary,
            positions=positions,
            slots=positions,
            row_starts=np.array([0, length], np.int32),
            contexts=np.array([length], np.int32),
            block_tables=np.arange(width, dtype=np.int32)[None, :],
            logit_rows=np.array([length - 1], np.int32),
        )

    def seconds(self, plan: StepPlan, repeats: int) -> list[float]:
        self._backend.run(plan)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._backend.run(plan)
            times.append(time.perf_counter() - start)
        return times

    def phases(self, plan: StepPlan, repeats: int) -> dict[str, float]:
        """Seconds of one step by kind of operation."""
        self._backend.time_phases(True)
        for _ in range(repeats):
            self._backend.run(plan)
        found: dict[str, float] = defaultdict(float)
        for name, value in self._backend.phase_seconds().items():
            found["linear" if name.startswith("linear") else name] += value / repeats
        self._backend.time_phases(False)
        return dict(found)


class _Timed:
    """Passes every call on, and adds up the seconds of some."""

    def __init__(self, inner: Any, names: Iterable[str]) -> None:
        self._inner, self._names = inner, frozenset(names)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def python_seconds(core: Any, batch: int, repeats: int) -> float:
    """Median of what a step of the engine takes outside of the back end and its sampler."""
    inner = core.backend
    sampler = _Timed(inner.sampler, ("choose", "score"))
    backend = _Timed(inner, ("run",))
    backend.sampler = sampler
    core.backend = backend
    params = SamplingParams(temperature=0, max_tokens=repeats + 8, ignore_eos=True)
    for i in range(batch):
        core.add(Request(id=f"{batch}-{i}", prompt=tuple(range(i, i + 16)), params=params))
    for _ in range(4):  # all prompts are read, and the batch decodes
        core.step()
    times = []
    for _ in range(repeats):
        before = backend.seconds + sampler.seconds
        start = time.perf_counter()
        core.step()
        wall = time.perf_counter() - start
        times.append(wall - (backend.seconds + sampler.seconds - before))
    core.backend = inner
    while core.has_work:
        core.step()
    return statistics.median(times)


def profile(steps: Steps, backend: NativeBackend, repeats: int) -> list[Any]:
    """Of each kind of step: seconds by operation, and what it has to read or to multiply."""
    about = backend.describe()
    rows = []
    for name, batch, context in (("decode of 1", 1, 192), ("decode of 32", 32, 320)):
        plan = steps.decode(batch, context)
        whole = statistics.median(steps.seconds(plan, repeats))
        needed = about["weight_bytes"] + about["kv_bytes_per_token"] * batch * context
        rows.append(_row(name, whole, steps.phases(plan, repeats), {"bytes": needed}))
    plan = steps.prefill(1024)
    whole = statistics.median(steps.seconds(plan, repeats))
    operations = 2 * about["linear_parameters"] * 1024
    rows.append(
        _row("prefill of 1,024", whole, steps.phases(plan, repeats), {"operations": operations})
    )
    return rows


def _row(name: str, whole: float, phases: dict[str, float], needs: dict[str, float]) -> Any:
    return {"step": name, "seconds": whole, "phases": phases, **needs}


def shares_of_limit(row: Any, machines: Sequence[Calibration]) -> dict[str, float]:
    """Of the best that the machine did in any calibration."""
    if "bytes" in row:
        rate = max(machine.bandwidth(row["bytes"]) for machine in machines) * 1e9
        return {"bandwidth": row["bytes"] / rate / row["seconds"]}
    shares = {}
    for type in ("int8", "bf16"):
        if rate := max(machine.peak(type) for machine in machines) * 1e9:
            least = row["operations"] / rate
            shares[f"{type} peak, the linear layers"] = least / row["phases"]["linear"]
            shares[f"{type} peak, the whole step"] = least / row["seconds"]
    return shares


def growth(steps: Steps, repeats: int, longest: int) -> dict[str, Any]:
    """Milliseconds of a decode step: medians, by batch and by context."""

    def milliseconds(batch: int, context: int) -> float:
        return 1e3 * statistics.median(steps.seconds(steps.decode(batch, context), repeats))

    contexts = [2**i for i in range(7, 24) if 2**i <= longest]
    return {
        "batch": {batch: milliseconds(batch, GROWTH_CONTEXT) for batch in BATCHES},
        "context": {
            batch: {context: milliseconds(batch, context) for context in contexts}
            for batch in CONTEXT_BATCHES
        },
    }


def tables(result: dict[str, Any]) -> Iterable[str]:
    names = sorted({name for row in result["profile"] for name in row["phases"]})
    yield (
        "| step | whole, ms | " + " | ".join(f"{n}, ms" for n in names) + " | share of the limit |"
    )
    yield "|---" * (len(names) + 3) + "|"
    for row in result["profile"]:
        cells = [f"{1e3 * row['seconds']:.2f}"]
        cells += [f"{1e3 * row['phases'].get(name, 0):.2f}" for name in names]
        shares = ", ".join(
            f"{share:.0%} of {name}" for name, share in row["share_of_limit"].items()
        )
        yield f"| {row['step']} | " + " | ".join(cells) + f" | {shares} |"
    yield ""
    yield f"| batch (context {GROWTH_CONTEXT}) | step, ms | Python, ms | Python's share |"
    yield "|---|---|---|---|"
    for batch, value in result["growth"]["batch"].items():
        python = result["python"][batch]
        yield f"| {batch} | {value:.2f} | {python:.3f} | {python / (value + python):.1%} |"
    yield ""
    by_batch = result["growth"]["context"]
    yield "| context | " + " | ".join(f"batch {batch}, ms" for batch in by_batch) + " |"
    yield "|---" * (len(by_batch) + 1) + "|"
    for context in next(iter(by_batch.values())):
        cells = " | ".join(f"{values[context]:.2f}" for values in by_batch.values())
        yield f"| {context:,} | {cells} |"


def plot(result: dict[str, Any], path: Path) -> None:
    """Both growths and the share of Python in one picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "trimaran"
    from matplotlib import pyplot, ticker

    plain = ticker.FuncFormatter(lambda value, _: f"{value:,g}")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    batches = list(result["growth"]["batch"])
    contexts = list(next(iter(result["growth"]["context"].values())))
    left.loglog(batches, list(result["growth"]["batch"].values()), "o-", label="back end")
    left.loglog(
        batches, [result["python"][b] for b in batches], "s--", label="Python, and its share"
    )
    left.set(xlabel=f"batch, at context {GROWTH_CONTEXT}", ylabel="a step, ms")
    for batch, values in result["growth"]["context"].items():
        right.loglog(list(values), list(values.values()), "o-", label=f"batch {batch}")
    right.set(xlabel="context, tokens", ylabel="a step, ms")
    for batch in (batches[0], 32, batches[-1]):
        spent, step = result["python"][batch], result["growth"]["batch"][batch]
        share = f"{spent / (spent + step):.1%}"
        left.annotate(share, (batch, spent), (0, 7), textcoords="offset points", ha="center")
    for axes, ticks in ((left, batches), (right, contexts)):
        axes.legend(loc="upper left")
        axes.grid(True, which="both", alpha=0.3)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    left.margins(x=0.1)
    left.set_ylim(top=2 * max(result["growth"]["batch"].values()))
    figure.suptitle(f"A decode step of {result['model']}")
    figure.savefig(path, metadata={"Date": None})


def summary(machine: Calibration) -> dict[str, float]:
    sizes = sorted({r.bytes for r in machine.reads})
    found = {f"read {size >> 20} MiB, GB/s": machine.bandwidth(size) for size in sizes}
    return found | {f"{type}, GOP/s": machine.peak(type) for type in ("int8", "bf16", "f32")}


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in {field.name for field in fields(EngineConfig)}:
        raise argparse.ArgumentTypeError(f"'{name}' is no option of the engine")
    return name, int(value) if value.isdigit() else value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--option", action="append", type=option, default=[])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--longest", type=int, default=8192)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = EngineConfig(
        backend="native",
        max_num_seqs=max(BATCHES),
        kv_cache_bytes=256 << 20,
        **dict(args.option),
    )
    core = load_engine(args.model, config).core
    backend = core.backend
    assert isinstance(backend, NativeBackend)
    python = {batch: python_seconds(core, batch, 3 * args.repeats) for batch in BATCHES}
    about = backend.describe()
    machine = calibrate(about["threads"], [about["weight_bytes"]])
    longest = min(args.longest, core.model.context_length)
    tokens = max(max(BATCHES) * GROWTH_CONTEXT, max(CONTEXT_BATCHES) * longest, 32 * 320)
    steps = Steps(backend, tokens // BLOCK, core.model.vocab_size, config.max_num_batched_tokens)
    rows = profile(steps, backend, args.repeats)
    grown = growth(steps, args.repeats, longest)
    machines = [machine, calibrate(about["threads"], [about["weight_bytes"]])]
    for row in rows:
        row["share_of_limit"] = shares_of_limit(row, machines)
    result = {
        "model": args.model,
        "about": about,
        "profile": rows,
        "growth": grown,
        "python": {batch: 1e3 * seconds for batch, seconds in python.items()},
        "calibration": dict(zip(("before", "after"), map(summary, machines), strict=True)),
    }
    print("\n".join(tables(result)))
    for when, rates in result["calibration"].items():
        print(f"calibration {when}: " + ", ".join(f"{k} {v:,.0f}" for k, v in rates.items()))
    RESULTS.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = RESULTS / f"limits-{Path(args.model).stem}-{stamp}.json"
    target.write_text(json.dumps(result, indent=2))
    print(f"written to {target.relative_to(ROOT)}", file=sys.stderr)
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
