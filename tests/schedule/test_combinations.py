"""Every combination of policies and index, under pressure: outputs stay, blocks are conserved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import FakeEngine, make_engine

from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.core.config import CAPACITIES, CHUNKINGS, INDICES, ORDERS
from trimaran.core.errors import CapacityError
from trimaran.core.slo import BATCH, INTERACTIVE, STANDARD

CLASSES = (BATCH, INTERACTIVE, STANDARD)


def work(seed: int, count: int = 24) -> list[tuple[list[int], int, int]]:
    """(prompt, tokens to generate, n) of each; a few stems, and equal prompts too."""
    draw = random.Random(seed)
    stems = [[draw.randrange(9) for _ in range(18)] for _ in range(3)]
    prompts = [
        draw.choice(stems)[: draw.randrange(19)]
        + [draw.randrange(9) for _ in range(draw.randrange(1, 12))]
        for _ in range(count)
    ]
    return [
        (draw.choice(prompts), draw.randrange(1, 9), draw.choice([1, 1, 1, 3])) for _ in prompts
    ]


def outputs(engine: FakeEngine) -> dict[str, list[int]]:
    return {sequence.id: sequence.output for sequence in engine.done}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("index", INDICES)
@settings(max_examples=25, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    chunking=st.sampled_from(CHUNKINGS),
    size=st.sampled_from([1, 2, 4, 8]),
    room=st.integers(48, 160),
    seats=st.integers(3, 10),
    budget=st.integers(2, 40),
    seed=st.integers(0, 9),
)
def test_outputs_do_not_depend_on_the_policies(
    capacity: str, index: str, order: str, chunking: str, size: int, room: int, seats: int,
    budget: int, seed: int,
) -> None:  # fmt: skip
    if order == "longest-prefix" and chunking == "static":
        order = "fcfs"
    alone = make_engine(num_blocks=200, max_num_seqs=3, prefix_cache=False)
    kv = KVCacheManager(-(-room // size), size, index=make_index(index, size))
    engine = make_engine(
        kv=kv, max_num_seqs=seats, max_num_batched_tokens=budget, order=order,
        chunking=chunking, capacity=capacity, index=index,
    )  # fmt: skip
    refused = set()
    for number, (prompt, more, n) in enumerate(work(seed)):
        alone.add(prompt, more, n=n)
        alone.drain()
        try:
            engine.add(prompt, more, n=n, priority=number % 3, slo=CLASSES[number % 3])
        except CapacityError:  # its promise is above the whole cache
            refused.add(f"r{number}")
        for _ in range(number % 3):
            engine.step()
            kv.check()
            engine.scheduler._running.check()
    engine.drain()
    expected = {
        name: output for name, output in outputs(alone).items() if name.split("#")[0] not in refused
    }
    failed = set(engine.failed)
    assert not failed or capacity == "max-utilization", "who was promised blocks outgrew them"
    found = {name: own for name, own in outputs(engine).items() if name.split("#")[0] not in failed}
    assert found == {
        name: own for name, own in expected.items() if name.split("#")[0] not in failed
    }
    assert kv.usage().held == 0
    kv.check()
    if capacity == "no-evict":
        assert all(sequence.preemptions == 0 for sequence in engine.done)
        assert engine.scheduler._capacity.promised == 0  # type: ignore[attr-defined]
