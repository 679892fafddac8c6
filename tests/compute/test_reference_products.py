"""Products of the reference back end: a row's bits are its own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.reference.ops import CACHED, product_by_rows


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 90),
    inputs=st.one_of(st.integers(1, 200), st.sampled_from([576, 1536, CACHED, CACHED + 1])),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_rows_do_not_depend_on_their_company(
    rows: int, outputs: int, inputs: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(outputs, inputs)).astype(np.float32)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    y = product_by_rows(matrix, x)
    exact = x.astype(np.float64) @ matrix.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(matrix).T.astype(np.float64)
    assert np.all(np.abs(y - exact) <= 1e-6 * size)
    begin = data.draw(st.integers(0, rows - 1), "begin")
    end = data.draw(st.integers(begin + 1, rows), "end")
    np.testing.assert_array_equal(product_by_rows(matrix, x[begin:end]), y[begin:end])


def test_no_rows() -> None:
    matrix = np.ones((5, 32), np.float32)
    assert product_by_rows(matrix, np.empty((0, 32), np.float32)).shape == (0, 5)
