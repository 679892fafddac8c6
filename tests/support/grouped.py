"""A fake back end with a cache for each group of layers, and an engine around it.

As `FakeBackend`: a slot keeps what must lie there, and a row looks at all that it sees. A layer
with a window looks at its window alone; what lies before may be anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from support.scheduling import Content, FakeBackend, FakeEngine, contents

from trimaran.cache.grouped import GroupedKVCache
from trimaran.cache.indices import make_index
from trimaran.cache.window_group import WindowGroup
from trimaran.core.config import EngineConfig
from trimaran.core.step_plan import GroupTables
from trimaran.schedule.scheduler import ScheduledStep


class GroupedBackend(FakeBackend):
    """Writes and checks contents in the caches of all groups."""

    def __init__(self, kv: GroupedKVCache, whole: bool) -> None:
        super().__init__(kv)
        self._whole = whole
        self.caches: dict[WindowGroup, list[Content | None]] = {
            group: [None] * (group.num_blocks * group.block_size) for group in kv.groups
        }

    def run(self, step: ScheduledStep) -> None:
        plan = step.plan
        first = GroupTables(plan.slots, plan.block_tables, plan.copies)
        tables = list(plan.more) if self._whole else [first, *plan.more]
        assert len(tables) == len(self.caches)
        if self._whole:
            super().run(step)
        else:
            self._check_shape(step)
        for (group, slots), own in zip(self.caches.items(), tables, strict=True):
            self._run_group(step, group, slots, own)

    def _run_group(
        self, step: ScheduledStep, group: WindowGroup, slots: list[Content | None], own: GroupTables
    ) -> None:
        size, plan = group.block_size, step.plan
        for source, target in own.copies.tolist():
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        expected = [contents(e.sequence.request.namespace, e.sequence.tokens) for e in step.entries]
        for number, entry in enumerate(step.entries):
            for offset in range(entry.count):
                row = int(plan.row_starts[number]) + offset
                position = entry.start + offset
                block = int(own.block_tables[number, position // size])
                assert own.slots[row] == block * size + position % size
                if not entry.sequence.finished:
                    assert group.pool.references(block) == 1, "others hold this block"
                    assert block not in group.index, "a stored block is written"
                slots[own.slots[row]] = expected[number][position]
        for number, entry in enumerate(step.entries):
            table = own.block_tables[number].tolist()
            begin = max(0, entry.start - group.window + 1)
            for position in range(begin, entry.start + entry.count):
                block = table[position // size]
                assert block >= 0, f"{entry.sequence.id} has let go of position {position}"
                found = slots[block * size + position % size]
                assert found == expected[number][position], (
                    f"{entry.sequence.id} reads a foreign position {position}"
                )
            if not entry.sequence.finished:
                held = sum(block >= 0 for block in group.block_table(entry.sequence))
                assert held <= -(-(group.window - 1 + entry.count) // size) + 2, (
                    "more than its window"
                )


def grouped_engine(
    windows: Row[tuple[int, int]],
    *,
    blocks: int = 64,
    block_size: int = 4,
    rows: int = 16,
    prefix_cache: bool = True,
    index: str = "hash",
) -> FakeEngine:
    """An engine over groups of layers.

    Args:
        windows: (window, blocks) of each group with one.
        blocks: of the layers that see all; 0 where there are none.
        rows: tokens in a step, at most.
    """
    kv = GroupedKVCache(
        blocks,
        windows,
        block_size,
        max_tokens=4096,
        most_rows=rows,
        prefix_cache=prefix_cache,
        index=make_index(index, block_size) if prefix_cache else None,
    )
    engine = FakeEngine(EngineConfig(max_num_seqs=8, max_num_batched_tokens=rows), kv)
    engine.backend = GroupedBackend(kv, blocks > 0)
    return engine
