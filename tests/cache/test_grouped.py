"""Groups of layers with windows: hits, what is held, what is given up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grouped import grouped_engine

from trimaran.cache.grouped import GroupedKVCache
from trimaran.core.request import Request, Sequence
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams


def sequence(tokens: list[int], salt: str = "", **request: object) -> Sequence:
    made = Request("r", list(tokens), SamplingParams(), cache_salt=salt, **request)  # type: ignore[arg-type]
    return Sequence(made, 0, list(tokens))


def cache(
    blocks: int = 64, windows: tuple[tuple[int, int], ...] = ((6, 32),), index: str = "hash"
) -> GroupedKVCache:
    kv = grouped_engine(windows, blocks=blocks, index=index).kv
    assert isinstance(kv, GroupedKVCache)
    return kv


def compute(kv: GroupedKVCache, one: Sequence, step: int = 16) -> int:
    """Admits and computes all of its tokens, in steps; how many were found."""
    match = kv.match(one)
    rows = min(step, one.total - match.tokens)
    assert kv.admit(one, match, one.total, rows)
    one.computed = match.tokens
    while one.computed < one.total:
        assert kv.allocate(one, min(one.total, one.computed + step))
        one.computed = min(one.total, one.computed + step)
        kv.commit(one, one.computed)
        kv.check()
    return match.tokens


def test_blocks_before_the_window_are_let_go() -> None:
    kv = cache()
    one = sequence(list(range(40)))
    compute(kv, one, 4)
    (group,) = kv.groups
    # The next row, at 40, sees 35 .. 40: of block 8 on.
    assert group.block_table(one)[:8] == [-1] * 8
    assert len(group.block_table(one)) == 10 and min(group.block_table(one)[8:]) >= 0
    assert (group.pool.num_held, group.pool.num_cached) == (2, 8)
    assert kv.pool.num_held == 10
    usage = kv.usage()
    assert (usage.total, usage.held, usage.cached) == (64 + 32, 12, 8)
    assert usage.free + usage.held + usage.cached == usage.total
    kv.release(one)
    kv.check()
    assert group.pool.num_held == kv.pool.num_held == 0


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_hit_needs_only_the_last_window(index: str) -> None:
    kv = cache(index=index)
    one = sequence(list(range(40)))
    compute(kv, one)
    kv.release(one)
    (group,) = kv.groups
    while group.pool.num_free or group.pool.num_cached > 2:  # all but the two used last
        group.pool.allocate(1)
    assert kv.match(sequence([*range(40), 99, 98])).tokens == 40


def test_a_hit_is_cut_where_a_window_has_gaps() -> None:
    kv = cache(windows=((6, 32), (14, 32)))
    tokens = list(range(40))
    one = sequence(tokens)
    compute(kv, one)
    narrow, wide = kv.groups
    kv.release(one)
    longer = sequence([*tokens, 99])
    assert kv.match(longer).tokens == 40
    # A gap at block 8 of the wide group: prefixes of 36 .. 40 tokens see it, one of 32 doesn't.
    gap = wide.index.find(wide._digests(longer, 40)[8])  # who is asked changes nothing
    assert gap is not None
    wide.pool.retain(gap)
    del wide.index._blocks[wide.index._digests.pop(gap)]
    wide.pool.release(gap)
    assert wide.hit(longer, 40) == 32
    assert narrow.hit(longer, 40) == 40
    assert kv.match(longer).tokens == 32


def test_salts_are_kept_apart() -> None:
    kv = cache(blocks=0)
    compute(kv, sequence(list(range(20)), "a"))
    assert kv.match(sequence([*range(20), 1], "a")).tokens == 20
    assert kv.match(sequence([*range(20), 1], "b")).tokens == 0


def test_what_a_request_asks_to_keep_stays() -> None:
    kv = cache(blocks=0, windows=((6, 12),))
    kept = sequence(list(range(16)), retention=Retention(90, None))
    compute(kv, kept)
    kv.release(kept)
    for start in (100, 200, 300):
        other = sequence(list(range(start, start + 32)))
        compute(kv, other)
        kv.release(other)
    assert kv.match(sequence([*range(16), 1])).tokens == 16
    kv.reset_prefix_cache()
    assert kv.match(sequence([*range(16), 1])).tokens == 0
    kv.check()


def test_too_few_blocks_change_nothing() -> None:
    kv = cache(windows=((6, 4),))
    (group,) = kv.groups
    one, two = sequence(list(range(12))), sequence(list(range(50, 62)))
    assert kv.admit(one, kv.match(one), 12, 12)
    before = (kv.pool.num_free, group.pool.num_free)
    assert not kv.admit(two, kv.match(two), 12, 12)
    assert not kv.allocate(one, 24)
    assert (kv.pool.num_free, group.pool.num_free) == before
    kv.check()


def naive_hit(stored: list[bool], window: int, size: int, tokens: int) -> int:
    """The longest beginning in whole blocks all of whose last window's blocks are stored."""
    for end in range(tokens // size, 0, -1):
        seen = range(max(0, end * size - window + 1), end * size)
        if all(stored[position // size] for position in seen):
            return end * size
    return 0


@settings(max_examples=200, deadline=None)
@given(
    stored=st.lists(st.booleans(), min_size=1, max_size=12),
    window=st.integers(1, 30),
    size=st.sampled_from([4, 8]),
    data=st.data(),
)
def test_hits_are_those_of_a_naive_model(
    stored: list[bool], window: int, size: int, data: st.DataObject
) -> None:
    kv = grouped_engine([(window, 64)], blocks=64, block_size=size).kv
    assert isinstance(kv, GroupedKVCache)
    (group,) = kv.groups
    one = sequence(list(range(len(stored) * size + 1)))
    for digest, flag in zip(group._digests(one, one.total), stored, strict=True):
        if flag:
            (block,) = group.pool.allocate(1) or ()
            group.index.insert(digest, block)
            group.pool.release(block)
    tokens = data.draw(st.integers(0, len(stored) * size), "candidate")
    assert group.hit(one, tokens) == naive_hit(stored, window, size, tokens)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_requests_over_any_groups(data: st.DataObject) -> None:
    """Each row finds what it must see in every group, nothing is held beyond the windows, and
    the tokens are those of an engine with room for all."""
    size = data.draw(st.sampled_from([4, 8]), "block size")
    rows = data.draw(st.sampled_from([3, 8, 20]), "rows of a step")
    spans = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=2, unique=True), "windows")
    blocks = data.draw(st.sampled_from([0, 14, 64]), "blocks")
    windows = [
        (span, -(-(span - 1 + rows) // size) + 2 + data.draw(st.integers(0, 12), "more"))
        for span in sorted(spans)
    ]
    options = {"block_size": size, "rows": rows}
    index = data.draw(st.sampled_from(["hash", "radix"]), "index")
    engine = grouped_engine(
        windows, blocks=blocks, index=index, prefix_cache=data.draw(st.booleans()), **options
    )
    plenty = grouped_engine([(span, 400) for span, _ in windows], blocks=400, **options)
    for _ in range(data.draw(st.integers(1, 14), "requests")):
        prompt = data.draw(PROMPTS, "prompt")
        request = {
            "max_tokens": data.draw(st.integers(1, 14)),
            "n": data.draw(st.sampled_from([1, 1, 2])),
            "salt": data.draw(st.sampled_from(["", "a"])),
        }
        for each in (engine, plenty):
            each.add(prompt, **request)  # type: ignore[arg-type]
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            engine.step()
            engine.kv.check()
        if data.draw(st.integers(0, 9)) == 0:
            engine.kv.reset_prefix_cache()
    engine.drain()
    plenty.drain()
    engine.kv.check()
    tokens = {one.id: one.tokens for one in plenty.done}
    assert len(engine.done) == len(tokens)
    for one in engine.done:
        assert one.request.id in engine.failed or one.tokens == tokens[one.id]
    assert isinstance(engine.kv, GroupedKVCache)
    for group in engine.kv.groups:
        assert group.pool.num_held == 0
