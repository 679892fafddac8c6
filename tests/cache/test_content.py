"""Digests: equal for equal content after equal content, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.content import ContentHash, StoredBlock, StoredBlocks
from trimaran.cache.manager import KVCacheManager
from trimaran.core.namespace import Namespace
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams


def digests(content: ContentHash, tokens: list[int], salt: str, size: int = 2) -> list[bytes]:
    return list(content.chain(content.root(Namespace(salt)), tokens, 0, len(tokens) // size, size))


TOKENS = st.lists(st.integers(0, 3), max_size=8)
CASES = st.tuples(
    TOKENS, st.sampled_from(["", "a", "ab"]), st.sampled_from([b"", b"m"]),
    st.sampled_from([b"", b"k"]), st.sampled_from([1, 2]),
)  # fmt: skip


@given(CASES, CASES)
def test_a_digest_stands_for_one_prefix_under_one_salt_space_and_key(a, b) -> None:  # type: ignore[no-untyped-def]
    def of(case):  # type: ignore[no-untyped-def]
        tokens, salt, space, key, size = case
        return digests(ContentHash(space, key), tokens, salt, size)

    for i, one in enumerate(of(a)):
        for j, other in enumerate(of(b)):
            sizes = (i + 1) * a[4], (j + 1) * b[4]
            same = a[0][: sizes[0]] == b[0][: sizes[1]] and a[1:] == b[1:]
            assert (one == other) == same
            assert len(one) == 32


def test_space_salt_and_adapter_don_t_run_into_each_other() -> None:
    parts = [("ab", "", ""), ("a", "b", ""), ("", "ab", ""), ("", "a", "b"), ("", "", "ab")]
    roots = {ContentHash(a.encode()).root(Namespace(b, c)) for a, b, c in parts}
    assert len(roots) == len(parts)


class Log:
    """What an observer knows to be stored."""

    def __init__(self) -> None:
        self.stored_now: dict[int, StoredBlock] = {}
        self.uses: list[int] = []

    def stored(self, stored: StoredBlock) -> None:
        assert stored.block not in self.stored_now
        self.stored_now[stored.block] = stored

    def used(self, found) -> None:  # type: ignore[no-untyped-def]
        self.uses += [stored.block for stored in found]

    def removed(self, stored: StoredBlock) -> None:
        assert self.stored_now.pop(stored.block) is stored

    def cleared(self) -> None:
        self.stored_now.clear()


def run(kv: KVCacheManager, tokens: list[int], salt: str = "") -> Sequence:
    sequence = Sequence(Request("r", tokens, SamplingParams(), cache_salt=salt), 0, tokens)
    assert kv.admit(sequence, kv.match(sequence), len(tokens))
    sequence.computed = len(tokens)
    kv.commit(sequence, len(tokens))
    return sequence


@pytest.mark.parametrize("salt", ["", "s"])
def test_the_manager_says_what_is_stored_used_and_given_up(salt: str) -> None:
    content = ContentHash(b"x")
    stored, log = StoredBlocks(2, content), Log()
    stored.observers.append(log)
    kv = KVCacheManager(4, 2, content=stored)
    first = run(kv, [1, 2, 3, 4, 5], salt)
    wanted = digests(content, [1, 2, 3, 4], salt)
    assert [s.digest for s in log.stored_now.values()] == wanted
    assert [s.before for s in log.stored_now.values()] == [None, wanted[0]]
    assert all(stored.at(block) is s for block, s in log.stored_now.items())
    kv.release(first)
    kv.check()
    second = run(kv, [1, 2, 3, 9, 9], salt)  # finds one block, and stores one beside
    assert log.uses == [next(iter(log.stored_now))]
    assert {s.digest for s in log.stored_now.values()} == {
        *wanted, *digests(content, [1, 2, 3, 9], salt)
    }  # fmt: skip
    kv.release(second)
    kv.release(run(kv, [7] * 8))  # takes all four
    assert {s.digest for s in log.stored_now.values()} == set(digests(content, [7] * 8, ""))
    kv.check()
    kv.reset_prefix_cache()
    assert not log.stored_now and len(stored) == 0
    kv.check()
