"""A sound file with some of its bytes changed: it loads, or it is refused in few words."""

from __future__ import annotations

import tracemalloc

from hypothesis import strategies as st
from support.tiny_files import Sound

from trimaran.core.errors import CheckpointError
from trimaran.models.load import load_checkpoint


def load_corrupted(sound: Sound, data: st.DataObject, likely: st.SearchStrategy[int]) -> None:
    """Changes up to six bytes, half of them in the header, perhaps cuts the end off, and
    loads; only a `CheckpointError` that names the file may come of it, and no memory.

    Args:
        likely: values of a byte that mean something to the format.
    """
    changed = bytearray(sound.content)
    places = st.integers(0, sound.header - 1) | st.integers(0, len(changed) - 1)
    values = likely | st.integers(0, 255)
    for place, value in data.draw(st.lists(st.tuples(places, values), min_size=1, max_size=6)):
        changed[place] = value
    if data.draw(st.booleans()):
        del changed[data.draw(places) :]
    sound.file.write_bytes(changed)
    tracemalloc.start()
    try:
        load_checkpoint(sound.path)
    except CheckpointError as error:
        assert str(sound.path) in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
