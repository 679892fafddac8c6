"""What operators are told about the cache, and what they aren't."""

from __future__ import annotations

import pytest

from trimaran.cache.indices import make_index
from trimaran.cache.inspection import HotPrefix, NamespaceReport
from trimaran.cache.manager import KVCacheManager
from trimaran.core.namespace import Namespace
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams


def serve(kv: KVCacheManager, tokens: list[int], salt: str = "") -> None:
    """Admits, computes and releases one sequence."""
    request = Request("r", tokens, SamplingParams(), cache_salt=salt)
    sequence = Sequence(request, 0, list(tokens))
    assert kv.admit(sequence, kv.match(sequence), len(tokens))
    sequence.computed = len(tokens)
    kv.commit(sequence, len(tokens))
    kv.release(sequence)


def test_an_empty_cache() -> None:
    for kv in (KVCacheManager(8, 4), KVCacheManager(8, 4, prefix_cache=False)):
        report = kv.inspect()
        assert (report.total, report.free, report.hit_rate) == (8, 8, 0.0)
        assert (report.namespaces, report.hottest) == ([], [])


def test_the_trie_tells_of_every_token_once() -> None:
    kv = KVCacheManager(32, 4, index=make_index("radix", 4))
    for tail in range(6):
        serve(kv, [1, 2, 3, 4, 5, 6, 10 + tail])
    report = kv.inspect(top=1)
    (own,) = report.namespaces
    assert own == NamespaceReport("", "", prefixes=6, blocks=7, tokens=6 + 6, hits=5)
    # The second finds the six in the middle of a run, where nothing ends yet.
    assert report.hottest == [HotPrefix("", "", 6, 4, (1, 2, 3, 4, 5, 6))]
    assert (report.queried_tokens, report.hit_tokens) == (42, 30)
    assert report.hit_rate == pytest.approx(30 / 42)


def test_the_hash_index_tells_of_full_blocks() -> None:
    kv = KVCacheManager(32, 4)
    for tail in range(6):
        serve(kv, [1, 2, 3, 4, 5, 6, 7, 10 + tail])
    report = kv.inspect()
    assert report.namespaces == [NamespaceReport("", "", prefixes=6, blocks=7, tokens=28, hits=5)]
    assert report.hottest == [HotPrefix("", "", 4, 5, (1, 2, 3, 4))]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_salt_and_its_prompts_are_not_told(index: str) -> None:
    kv = KVCacheManager(64, 4, index=make_index(index, 4))
    secret = "key-of-a-tenant"
    for _ in range(3):
        serve(kv, [701, 702, 703, 704, 705], salt=secret)
    serve(kv, list(range(20)))
    report = kv.inspect()
    text = repr(report)
    assert secret not in text and "701" not in text
    digests = [own.salt for own in report.namespaces]
    assert digests == ["", Namespace(secret).digest().hex()]
    assert report.hottest[0].salt == digests[1]
    assert (report.hottest[0].tokens, report.hottest[0].hits, report.hottest[0].head) == (4, 2, ())


def test_digests_differ_where_salt_or_adapter_do() -> None:
    names = [Namespace("ab"), Namespace("a", "b"), Namespace("", "ab"), Namespace("b", "a")]
    assert len({name.digest() for name in names}) == 4
