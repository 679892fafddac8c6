"""Which sequences of a step share chunks, against a search of all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.native import _native

CHUNK = 256


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[list[int]], list[tuple[int, int]]]:
    """Block size, block tables that part from each other here and there, and each sequence's
    first position and number of rows."""
    block_size = draw(st.sampled_from([16, 32]))
    blocks, tables, rows = CHUNK // block_size, [[]], []
    fresh = iter(range(1000, 10**6))
    for _ in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from(tables))
        kept = draw(st.integers(0, len(parent)))
        more = draw(st.integers(1, 3 * blocks))
        tables.append(parent[:kept] + [next(fresh) for _ in range(more)])
        room = len(tables[-1]) * block_size
        first = draw(st.integers(0, room - 1))
        rows.append((first, draw(st.integers(1, min(12, room - first)))))
    return block_size, tables[1:], rows


@given(step=steps(), most_rows=st.sampled_from([0, 1, 8]))
@settings(max_examples=200, deadline=None)
def test_all_that_can_be_shared_is(
    step: tuple[int, list[list[int]], list[tuple[int, int]]], most_rows: int
) -> None:
    block_size, tables, rows = step
    blocks = CHUNK // block_size
    width = max(map(len, tables))
    groups, shared = _native.prefix_groups(
        positions=np.asarray([f + i for f, n in rows for i in range(n)], np.int32),
        row_starts=np.cumsum([0] + [n for _, n in rows], dtype=np.int32),
        block_tables=np.asarray([t + [-1] * (width - len(t)) for t in tables], np.int32),
        block_size=block_size,
        most_rows=most_rows,
    )
    sharable = [first // CHUNK if n <= most_rows else 0 for first, n in rows]

    def together(a: int, b: int, chunk: int) -> bool:
        both = min(sharable[a], sharable[b]) > chunk
        end = (chunk + 1) * blocks
        return both and tables[a][:end] == tables[b][:end]

    company: dict[tuple[int, int], list[int]] = {}
    for members, begin, end in groups:
        assert begin < end
        for s in members:
            for chunk in range(begin, end):
                assert (s, chunk) not in company, "two groups attend to the same chunk"
                company[s, chunk] = sorted(members)
    for s in range(len(tables)):
        for chunk in range(sharable[s]):
            expected = [t for t in range(len(tables)) if together(s, t, chunk)]
            assert company.pop((s, chunk), [s]) == expected
            assert (chunk < shared[s]) == (len(expected) > 1)
    assert not company


def test_many_that_share_and_part() -> None:
    """256 decodes in four families of 4 chunks; two of the families share their first."""
    tables = np.full((256, 80), -1, np.int32)
    for s in range(256):
        family = s % 4
        tables[s, :64] = np.arange(64) + 64 * family
        tables[s, :16] = np.arange(16) + 64 * (family // 2)
        tables[s, 64:66] = 1000 + 2 * s, 1001 + 2 * s
    positions = np.full(256, 1040, np.int32)
    groups, shared = _native.prefix_groups(positions, np.arange(257, dtype=np.int32), tables, 16, 1)
    assert shared == [4] * 256
    found = sorted((begin, end, sorted(members)) for members, begin, end in groups)
    pairs = [(0, 1, [s for s in range(256) if s % 4 // 2 == half]) for half in (0, 1)]
    families = [(1, 4, [s for s in range(256) if s % 4 == family]) for family in range(4)]
    assert found == sorted(pairs + families)
