"""The host tier: never above its bound, and what it gives back is what was put in."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.host_store import HostStore

KEYS = st.integers(0, 7).map(lambda n: bytes([n]))


@given(
    st.integers(0, 40), st.lists(st.tuples(st.booleans(), KEYS, st.integers(1, 16)), max_size=60)
)
def test_the_least_recently_used_go_first(bound: int, steps) -> None:  # type: ignore[no-untyped-def]
    store = HostStore(bound)
    model: OrderedDict[bytes, int] = OrderedDict()
    for puts, key, size in steps:
        if puts:
            fits = store.put(key, np.full(size, key[0], np.uint8))
            assert fits == (key in model or size <= bound)
            if fits and key not in model:
                while sum(model.values()) + size > bound:
                    model.popitem(last=False)
                model[key] = size
        else:
            data = store.get(key)
            assert (data is not None) == (key in model)
            if data is not None:
                assert data.tolist() == [key[0]] * model[key]
        if key in model:
            model.move_to_end(key)
        store.check()
        assert store.nbytes == sum(model.values()) <= bound and len(store) == len(model)
    store.clear()
    assert store.nbytes == 0 and not len(store)
