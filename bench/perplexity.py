"""Perplexity on a text: each precision of weights, KV cache and activations, beside llama.cpp's.

    python bench/perplexity.py TEXT [--model smollm2-135m] [--weights bf16,int8,int4,as-is]
        [--kv bf16,int8] [--activations auto,int8] [--window 512] [--windows 40] [--peer]
        [--float32]

The text is cut into windows of --window tokens that don't overlap, of which --windows are
taken, evenly spread. Each is read by itself, and the tokens of its second half are scored,
as llama.cpp's own perplexity tool does: every scored token has at least half a window before
it. All engines get the same ids, those of this project's tokenizer.

--peer adds llama.cpp on the file as it is (KV cache in float16, flash attention off), and
--float32 llama.cpp in float32 on the dequantised weights: what no rounding would give. Each
row has the ratio to the first row, with the standard error that the spread of the windows
gives it. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimaran.core.config import EngineConfig
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint
from trimaran.models.store import resolve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle.float_gguf import write_float_gguf
from oracle.llama_cpp import LlamaCppOracle
from oracle.teacher_forcing import logits_of

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Scores = Callable[[list[int]], Float64]
"""Of a window's ids: log-probability of each token after the first, [len - 1]."""


def windows_of(ids: list[int], length: int, count: int) -> list[list[int]]:
    """`count` windows of `length` tokens, evenly spread over the text.

    Raises:
        SystemExit: the text has fewer.
    """
    available = len(ids) // length
    if available < count:
        raise SystemExit(f"the text has {available} windows of {length} tokens, not {count}")
    starts = [length * (i * available // count) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def token_scores(logits: Float32, targets: list[int]) -> Float64:
    """[T] log-probabilities of `targets` under logits [T, vocab]."""
    peak = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - peak).sum(axis=1, dtype=np.float64))
    picked = logits[np.arange(len(targets)), targets].astype(np.float64)
    return picked - peak[:, 0] - total


def mean_losses(windows: list[list[int]], scores: Scores) -> Float64:
    """[windows] mean negative log-probability of the tokens in the second half."""
    return np.array([-scores(ids)[len(ids) // 2 - 1 :].mean() for ids in windows])


def ours(path: Path, config: EngineConfig, windows: list[list[int]]) -> Float64:
    backend = make_backend(load_checkpoint(path).model, config)

    def scores(ids: list[int]) -> Float64:
        parts = [
            token_scores(logits[: len(ids) - 1 - start], ids[start + 1 : start + 1 + len(logits)])
            for start, logits in logits_of(backend, ids)
        ]
        return np.concatenate(parts)

    try:
        return mean_losses(windows, scores)
    finally:
        backend.close()


def theirs(path: Path, windows: list[list[int]], kv_type: str, threads: int) -> Float64:
    with LlamaCppOracle(path, threads, n_ctx=len(windows[0]), kv_type=kv_type) as peer:
        return mean_losses(windows, lambda ids: token_scores(peer.logits(ids)[:-1], ids[1:]))


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Float64]]:
    """(weights, KV cache and activations as cells of a row, losses by window) of each row."""
    path = Path(resolve(args.model))
    text = args.text.read_text(encoding="utf-8")
    ids = list(load_checkpoint(path).tokenizer().encode(text, add_special_tokens=False))
    windows = windows_of(ids, args.window, args.windows)
    choices = (args.weights, args.kv, args.activations)
    for weights, kv, activations in product(*(choice.split(",") for choice in choices)):
        config = EngineConfig(
            backend="native",
            weights=weights,
            kv=kv,
            activations=activations,
            threads=args.threads,
        )
        yield f"{weights} | {kv} | {activations}", ours(path, config, windows)
    threads = args.threads or 2
    if args.peer:
        yield "llama.cpp, file as it is | f16 | its own", theirs(path, windows, "f16", threads)
    if args.float32:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "float32.gguf"
            write_float_gguf(path, target)
            yield "llama.cpp, float32 | f32 | f32", theirs(target, windows, "f32", threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a GGUF model")
    parser.add_argument("--weights", default="bf16,int8,int4,as-is")
    parser.add_argument("--kv", default="bf16,int8")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    print("| weights | KV cache | activations | perplexity | to the first row | ± |")
    print("|---|---|---|---|---|---|")
    first: Float64 | None = None
    for name, losses in measure(args):
        first = losses if first is None else first
        difference = losses - first
        error = difference.std(ddof=1) / math.sqrt(len(difference))
        change = math.expm1(difference.mean())
        print(
            f"| {name} | {math.exp(losses.mean()):.3f} | {change:+.2%} | {error:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
