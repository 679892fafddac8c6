"""The matrix that mirrors the tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.block_table import TableMatrix


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["take", "extend", "give back"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_rows_mirror_their_tables_while_the_matrix_grows(operations: list[tuple[str, int]]) -> None:
    matrix = TableMatrix(rows=1, width=1)
    tables: dict[int, list[int]] = {}
    number = 0
    for operation, size in operations:
        rows = list(tables)
        if operation == "take":
            row = matrix.take_row()
            assert row not in tables
            tables[row] = []
        elif rows and operation == "extend":
            row = rows[size % len(rows)]
            blocks = list(range(number, number + size))
            number += size
            matrix.extend(row, len(tables[row]), blocks)
            tables[row] += blocks
        elif rows:
            row = rows[size % len(rows)]
            matrix.give_back(row, len(tables.pop(row)))
        for row in range(len(matrix.blocks)):
            table = tables.get(row, [])
            assert matrix.blocks[row, : len(table)].tolist() == table
            assert (matrix.blocks[row, len(table) :] == -1).all()
    assert matrix.blocks.dtype == matrix.writable.dtype == "int32"
    assert len(matrix.writable) == len(matrix.blocks)


def test_a_block_in_the_middle_can_be_replaced() -> None:
    matrix = TableMatrix()
    row = matrix.take_row()
    matrix.extend(row, 0, [4, 5, 6])
    matrix.extend(row, 1, [9])
    assert matrix.blocks[row, :4].tolist() == [4, 9, 6, -1]
