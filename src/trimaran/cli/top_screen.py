"""The picture that `trimaran top` shows: a view of a server as lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimaran.cli.top_source import View, quantile

BARS = "▁▂▃▄▅▆▇█"
LABEL = 10  # columns of what stands before each line
BOLD, DIM, RED, CYAN, YELLOW, GREEN = "1", "2", "31", "36", "33", "32"

Piece = tuple[str, str]  # text and its style, "" for none
Line = list[Piece]


def screen(view: View, columns: int, rows: int, color: bool) -> list[str]:
    """The lines of a picture, none wider than `columns`.

    Args:
        rows: at most so many lines; what is most important comes first.
        color: whether styles are written.
    """
    lines = [*_head(view), *_batch(view, columns), *_memory(view, columns), *_load(view)]
    lines += _latency(view)
    lines += _requests(view, max(0, rows - len(lines)))
    return [painted(line, columns, color) for line in lines[:rows]]


def painted(line: Line, columns: int, color: bool) -> str:
    """A line as text, cut off at `columns`; whatever would move the cursor is shown as "?"."""
    found, left = [], columns
    for text, style in line:
        text = "".join(c if c.isprintable() else "?" for c in text)[:left]
        left -= len(text)
        found.append(f"\x1b[{style}m{text}\x1b[0m" if color and style and text else text)
    return "".join(found).rstrip() if not color else "".join(found)


def spark(values: Iterable[float], most: float) -> str:
    """A column a value; a blank is zero."""
    if most <= 0:
        return ""
    return "".join(
        " " if value <= 0 else BARS[min(len(BARS) - 1, int(value / most * len(BARS)))]
        for value in values
    )


def seconds(value: float | None) -> str:
    """ "870 µs", "12.3 ms", "1.23 s"; "-" for none."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _head(view: View) -> list[Line]:
    server = view.state["server"]
    phase = str(server["phase"])
    return [
        [
            ("trimaran top", BOLD),
            (f"  {view.url}  {server['model']}  ", ""),
            (phase, GREEN if phase == "ready" else YELLOW),
            (f"  step {view.state['step']}", DIM),
        ]
    ]


def _batch(view: View, columns: int) -> list[Line]:
    width = max(8, columns - LABEL - 22)
    steps = view.steps[-width:]
    lines: list[Line] = []
    for kind, style in (("prefill", YELLOW), ("decode", CYAN)):
        values = [step[f"{kind}_tokens"] for step in steps]
        most = max(values, default=0)
        lines.append(
            [
                (_label(kind), BOLD),
                (spark(values, most).rjust(width), style),
                (f"  {view.rate(f'{kind}_tokens'):6.0f} tok/s", ""),
                (f" ≤{most}", DIM),
            ]
        )
    gaps = view.metric("trimaran:compute_gap_seconds_sum")
    interval = view.metric("trimaran:step_interval_seconds_sum")
    last = steps[-1]["seconds"] if steps else None
    text = f"{view.rate('steps'):.1f} a second, the last took {seconds(last)}"
    share = f", {gaps / interval:.1%} of the time in gaps" if interval else ""
    return [*lines, [(_label("steps"), BOLD), (text + share, "")]]


def _memory(view: View, columns: int) -> list[Line]:
    blocks = view.state["blocks"]
    total = max(1, blocks["total"])
    width = max(8, min(40, columns - LABEL - 30))
    held = round(blocks["held"] / total * width)
    held = max(held, 1) if blocks["held"] else 0
    cached = min(width - held, -(-blocks["cached"] * width // total))
    bar: Line = [
        (_label("KV cache"), BOLD),
        ("█" * held, CYAN),
        ("▒" * cached, YELLOW),
        ("░" * (width - held - cached), DIM),
        (f" {blocks['held'] / total:4.0%} held, {blocks['cached'] / total:.0%} cached", ""),
    ]
    fragmented = view.metric("trimaran:kv_fragmentation_ratio")
    rest = (
        f"{blocks['held']} held, {blocks['cached']} cached, {blocks['free']} free of"
        f" {blocks['total']} blocks of {blocks['size']}; {fragmented:.1%} of the held places unused"
    )
    return [bar, [(_label(""), ""), (rest, "")]]


def _load(view: View) -> list[Line]:
    state, server = view.state, view.state["server"]
    prefix = state["prefix_cache"]
    queried = prefix["queried"]
    hits = f"{prefix['hit'] / queried:.0%}" if queried else "-"
    lines: list[Line] = [
        [
            (_label("requests"), BOLD),
            (f"{state['running']} of {server['max_num_seqs']} run, ", ""),
            (f"{state['waiting']} wait", RED if state["waiting"] else ""),
            (f", {server['finished_requests']} ended; prefix hits {hits}", ""),
        ]
    ]
    troubles = [
        f"{view.metric(name):.0f} {text}"
        for name, text in (
            ("vllm:admission_rejections_total", "refused"),
            ("vllm:num_preemptions_total", "preempted"),
            ("trimaran:watchdog_failures_total", "ended by the watchdog"),
        )
        if view.metric(name)
    ]
    if troubles:
        lines.append([(_label(""), ""), (", ".join(troubles), RED)])
    return lines


def _latency(view: View) -> list[Line]:
    shares = (0.5, 0.9, 0.99)
    heads = "".join(f"{f'p{share * 100:.0f}':>10}" for share in shares)
    lines: list[Line] = [[(_label("latency"), BOLD), (heads, DIM)]]
    for name in ("ttft", "tpot", "itl"):
        found = view.state["latency"][name]
        values = [quantile(found["bounds"], found["counts"], share) for share in shares]
        text = "".join(f"{seconds(value):>10}" for value in values)
        lines.append([(_label("  " + name.upper()), ""), (text, "")])
    return lines


def _requests(view: View, rows: int) -> list[Line]:
    """A table of the requests that run and wait, in so many lines with its head."""
    requests = view.state["requests"]
    known: list[tuple[str, dict[str, Any]]] = [
        (state, each) for state in ("running", "waiting") for each in requests[state]
    ]
    if not known or rows < 3:
        return []
    heads = ("AGE", "PROMPT", "CACHED", "OUTPUT", "PREEMPTED")
    lines: list[Line] = [
        [],
        [("STATE   " + "".join(f"{head:>10}" for head in heads) + "  ID", DIM)],
    ]
    room = rows - len(lines)
    shown = known if len(known) <= room else known[: room - 1]
    for state, each in shown:
        values = (
            f"{each['age']:.1f} s",
            each["prompt_tokens"],
            each["cached_tokens"],
            each["output_tokens"],
            each["preemptions"],
        )
        text = f"{state:<8}" + "".join(f"{value:>10}" for value in values) + f"  {each['id']}"
        lines.append([(text, "" if state == "running" else DIM)])
    if len(shown) < len(known):
        lines.append([(f"and {len(known) - len(shown)} more", DIM)])
    return lines


def _label(text: str) -> str:
    return f"{text:<{LABEL}}"
