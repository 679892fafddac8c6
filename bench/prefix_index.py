"""What finding, storing and evicting a prefix costs, with many blocks stored.

    python bench/prefix_index.py --blocks 100000

Prompts share a beginning of 1,024 tokens and go on by themselves, as with a system prompt.
For each index: microseconds a block, and bytes a stored block (as Python counts them).
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable

from trimaran.cache.indices import make_index
from trimaran.cache.prefix_index import PrefixIndex
from trimaran.core.namespace import Namespace

SHARED, OWN = 1024, 1024  # tokens
HERE = Namespace()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="stored blocks")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    print(f"{args.blocks} blocks of {args.block_size} tokens; microseconds a block")
    print("index   match   miss  insert   evict  bytes a block")
    for name in ("hash", "radix"):
        print(measure(name, args.blocks, args.block_size))


def measure(name: str, blocks: int, size: int) -> str:
    """One line of the table."""
    tracemalloc.start()
    index, draw = make_index(name, size), random.Random(1)
    shared = [draw.randrange(49_000) for _ in range(SHARED)]
    last = shared
    while len(index) < blocks:
        last = shared + [draw.randrange(49_000) for _ in range(OWN)]
        store(index, last, size, len(index))
    held = tracemalloc.get_traced_memory()[0] / len(index)
    tracemalloc.stop()

    per = len(last) // size
    match = best(lambda: index.match(last, HERE, len(last)), per)
    strangers = [draw.randrange(49_000) for _ in range(len(last))]
    miss = best(lambda: index.match(strangers, HERE, len(strangers)), 1)
    fresh = [[draw.randrange(49_000) for _ in range(len(last))] for _ in range(30)]
    insert = best(lambda: store(index, fresh.pop(), size, len(index)), per)
    evict = best(lambda: [index.evict() for _ in range(300)], 300)
    times = "".join(f"{1e6 * seconds:8.2f}" for seconds in (match, miss, insert, evict))
    return f"{name:5}{times}  {held:13.0f}"


def store(index: PrefixIndex, tokens: list[int], size: int, number: int) -> None:
    """As a sequence that comes and goes, with blocks from `number` on."""
    match = index.match(tokens, HERE, len(tokens))
    for block in match.blocks:
        index.held(block)
    held = list(match.blocks)
    for start in range(len(held) * size, len(tokens) - size + 1, size):
        held.append(index.insert(match.cursor, tokens[start : start + size], number))
        number += 1
    for block in reversed(held):
        index.unheld(block)


def best(call: Callable[[], object], parts: int) -> float:
    """Seconds a part, the best of 30 calls."""
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) / parts


if __name__ == "__main__":
    main()
