"""Both indices against a naive model, to the token and to the block that is evicted.

The model keeps a flat table of stored blocks: namespace, all tokens up to the block's end,
when it was last used, what priority it was given. What is the longest stored prefix, which
block goes first and what is spent are found in it by looking at everything. Content is
simulated too, so a copy that came too late, or of a block that was written to, shows.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.scheduling import Content, contents

from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import Match
from trimaran.core.namespace import Namespace
from trimaran.core.request import Request, Sequence
from trimaran.core.retention import DEFAULT_PRIORITY, Retention
from trimaran.core.sampling_params import SamplingParams

NAMESPACES = [Namespace(), Namespace(), Namespace("a"), Namespace("", "a")]
RETENTIONS = [None, None, None, Retention(80, 3.0), Retention(10), Retention(10, 5.0), Retention()]


def stem(number: int, length: int) -> list[int]:
    """Stems 0 and 1 begin alike for half of `length`, 2 differs from the first token on."""
    shared = length // 2 if number == 1 else 0
    return [(i * i + i // 3 + number * (i >= shared)) % 4 for i in range(length)]


def common(one: Row[int], two: Row[int]) -> int:
    """Tokens with which both begin."""
    length = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        length += 1
    return length


@dataclass
class Stored:
    """A block in the naive index."""

    namespace: Namespace
    tokens: tuple[int, ...]
    use: int = 0
    priority: int = DEFAULT_PRIORITY
    until: float | None = None


class IndexMachine(RuleBasedStateMachine):
    index_name: str
    size: int

    @initialize(num_blocks=st.integers(2, 14))
    def start(self, num_blocks: int) -> None:
        self.kv = KVCacheManager(
            num_blocks, self.size, index=make_index(self.index_name, self.size)
        )
        self.index = self.kv.index
        self.radix = self.index_name == "radix"
        self.stored: dict[int, Stored] = {}
        self.slots: list[Content | None] = [None] * (num_blocks * self.size)
        self.sequences: list[Sequence] = []
        self.copied: dict[Sequence, int] = {}
        self.new: set[Sequence] = set()  # admitted, not yet in a step
        self.closed: set[Sequence] = set()
        self.past: list[list[int]] = []
        self.uses = self.names = 0
        self.now = 0.0
        evict = self.index.evict
        self.index.evict = lambda: self.evicted(evict())  # type: ignore[method-assign]

    # ------------------------------------------------------------------ the naive model

    def continued(self, stored: Stored) -> bool:
        """Whether a stored block holds all its tokens and more."""
        length = len(stored.tokens)
        return any(
            other.namespace == stored.namespace
            and len(other.tokens) > length
            and other.tokens[:length] == stored.tokens
            for other in self.stored.values()
        )

    def first_to_go(self) -> int:
        """The unheld block that is evicted next."""
        ranks = []
        for block, stored in self.stored.items():
            continued, full = self.continued(stored), len(stored.tokens) % self.size == 0
            if self.kv.pool.references(block) == 0 and not (full and continued):
                ranks.append((-1 if continued else stored.priority, stored.use, block))
        return min(ranks)[2]

    def evicted(self, block: int) -> int:
        assert block == self.first_to_go()
        del self.stored[block]
        return block

    def longest(self, namespace: Namespace, tokens: Row[int]) -> int:
        """Length of the longest stored prefix."""
        hits = [0]
        for stored in self.stored.values():
            if stored.namespace == namespace:
                hit = common(stored.tokens, tokens)
                hits.append(hit if self.radix else hit - hit % self.size)
        return max(hits)

    def use(self, block: int) -> None:
        self.uses += 1
        self.stored[block].use = self.uses

    def holds(self, namespace: Namespace, tokens: Row[int]) -> bool:
        return self.longest(namespace, tokens) == len(tokens)

    # ------------------------------------------------------------------ what can happen

    def prompt(self, data: st.DataObject) -> list[int]:
        if self.past and data.draw(st.booleans()):  # a next turn
            past = data.draw(st.sampled_from(self.past[-4:]))
            return past + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        length = self.size * 3 + self.size // 2
        begin = stem(data.draw(st.integers(0, 2)), length)[: data.draw(st.integers(0, length))]
        return begin + data.draw(st.lists(st.integers(0, 3), min_size=not begin, max_size=3))

    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        retention=st.sampled_from(RETENTIONS),
        reserve=st.integers(0, 9),
    )
    def admit(
        self, data: st.DataObject, namespace: Namespace, retention: Retention | None, reserve: int
    ) -> None:
        self.names += 1
        prompt = self.prompt(data)
        request = Request(
            f"r{self.names}", prompt, SamplingParams(), cache_salt=namespace.salt,
            adapter=namespace.adapter, retention=retention,
        )  # fmt: skip
        sequence = Sequence(request, 0, list(prompt))
        match = self.kv.match(sequence)
        self.check_match(match, namespace, prompt)
        before, tables = self.kv.usage(), dict(self.stored)
        resting = sum(self.kv.pool.references(block) == 0 for block in match.blocks)
        fresh = self.kv.blocks_for(len(prompt) + reserve) - len(match.blocks)
        fits = fresh <= before.free + before.cached - resting
        unheld = match.source is not None and self.kv.pool.references(match.source) == 0
        if fits and unheld:
            assert match.source is not None
            self.use(match.source)
        assert self.kv.admit(sequence, match, len(prompt) + reserve) == fits
        if not fits:
            assert self.kv.usage() == before and self.stored == tables
            return
        sequence.computed = match.tokens
        self.sequences.append(sequence)
        self.copied[sequence] = match.tokens
        self.new.add(sequence)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def look_up(self, data: st.DataObject, namespace: Namespace) -> None:
        tokens = self.prompt(data)
        limit = data.draw(st.integers(0, len(tokens)))
        match = self.index.match(tokens, namespace, limit)
        self.check_match(match, namespace, [*tokens[:limit], -1])

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, fails: bool) -> None:
        ends: dict[Sequence, int] = {}
        for sequence in list(self.sequences):
            if sequence not in self.new and not data.draw(st.booleans()):
                continue
            if sequence.computed == sequence.total:
                sequence.tokens += data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
            end = data.draw(st.integers(sequence.computed + 1, sequence.total))
            before = self.kv.block_table(sequence)
            if not self.kv.allocate(sequence, end):
                assert self.kv.block_table(sequence) == before
                self.release(sequence)  # as when it is preempted
                continue
            last = sequence.computed // self.size
            after = self.kv.block_table(sequence)
            if sequence.computed % self.size and before[last] != after[last]:
                self.copied[sequence] = sequence.computed
            ends[sequence] = end
        self.new.clear()
        copies = self.kv.take_copies()
        if fails:
            for sequence in ends:
                self.release(sequence, sound=False)
            return
        for source, target in copies:
            self.slots[target * self.size : (target + 1) * self.size] = self.block(source)
        for sequence, end in ends.items():
            self.write(sequence, end)
        for sequence, end in ends.items():
            sequence.computed = end
            if sequence not in self.closed:
                self.store_full(sequence)
            self.kv.commit(sequence, end)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.sequences:
            self.release(data.draw(st.sampled_from(self.sequences)))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parents = [s for s in self.sequences if s.computed and s not in self.new]
        if parents and len(self.sequences) < 6:
            parent = data.draw(st.sampled_from(parents))
            self.names += 1
            child = Sequence(parent.request, self.names, list(parent.tokens[: parent.computed]))
            self.kv.fork(parent, child)
            child.computed = parent.computed
            self.sequences.append(child)
            self.copied[child] = child.computed
            if parent in self.closed:
                self.closed.add(child)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for stored in self.stored.values():
            if stored.until is not None and stored.until <= self.now:
                stored.priority, stored.until = DEFAULT_PRIORITY, None
        self.kv.at(self.now)

    @rule(count=st.integers(1, 6))
    def need_blocks(self, count: int) -> None:
        for block in self.kv.pool.allocate(min(self.kv.pool.available, count)) or []:
            self.kv.pool.release(block)

    @rule()
    def reset(self) -> None:
        if self.names % 5 == 4:  # seldom
            self.kv.reset_prefix_cache()
            self.stored.clear()
            self.closed = set(self.sequences)

    # ------------------------------------------------------------------ what it does

    def block(self, block: int) -> list[Content | None]:
        return self.slots[block * self.size : (block + 1) * self.size]

    def write(self, sequence: Sequence, end: int) -> None:
        """Computes up to `end`; what lies below must be what was computed."""
        expected = contents(sequence.request.namespace, sequence.tokens)
        table = self.kv.block_table(sequence)
        for position in range(end):
            slot = table[position // self.size] * self.size + position % self.size
            if position >= sequence.computed:
                assert table[position // self.size] not in self.stored, "it is stored"
                self.slots[slot] = expected[position]
            assert self.slots[slot] == expected[position], f"position {position} is foreign"

    def store_full(self, sequence: Sequence) -> None:
        namespace, table = sequence.request.namespace, self.kv.block_table(sequence)
        for place in range(sequence.computed // self.size):
            tokens = tuple(sequence.tokens[: (place + 1) * self.size])
            known = any(
                stored.namespace == namespace and stored.tokens == tokens
                for stored in self.stored.values()
            )
            if not known:
                self.stored[table[place]] = Stored(namespace, tokens)

    def release(self, sequence: Sequence, sound: bool = True) -> None:
        table, namespace = self.kv.block_table(sequence), sequence.request.namespace
        tokens = tuple(sequence.tokens[: sequence.computed])
        certain = sound and sequence.computed > self.copied.pop(sequence)
        tail = self.radix and certain and len(tokens) % self.size and sequence not in self.closed
        if tail and self.kv.pool.references(table[len(tokens) // self.size]) == 1:
            match = self.index.match(tokens, namespace, len(tokens))
            if not self.holds(namespace, tokens):
                self.stored[table[len(tokens) // self.size]] = Stored(namespace, tokens)
            elif match.source is not None and self.kv.pool.references(match.source) == 0:
                self.use(match.source)
        retention = sequence.request.retention
        if retention is not None:
            for block in table[: self.kv.blocks_for(sequence.prompt_length)]:
                if block in self.stored:
                    until = None if retention.seconds is None else self.now + retention.seconds
                    self.stored[block].priority = retention.priority
                    self.stored[block].until = until
        for block in reversed(table):
            if self.kv.pool.references(block) == 1 and block in self.stored:
                self.use(block)
        self.kv.release(sequence, sound=sound)
        if tokens:
            self.past.append(list(tokens))
        self.sequences.remove(sequence)
        self.new.discard(sequence)
        self.closed.discard(sequence)

    # ------------------------------------------------------------------ what must hold

    def check_match(self, match: Match, namespace: Namespace, tokens: Row[int]) -> None:
        """`match` is that of all tokens but the last."""
        assert match.tokens == self.longest(namespace, tokens[:-1])
        assert match.tokens == len(match.blocks) * self.size + match.partial
        assert match.partial < self.size
        for place, block in enumerate(match.blocks):
            assert self.stored[block].namespace == namespace
            assert self.stored[block].tokens == tuple(tokens[: (place + 1) * self.size])
        assert (match.source is None) == (match.partial == 0)
        if match.source is not None:
            stored = self.stored[match.source]
            assert stored.namespace == namespace
            assert stored.tokens[: match.tokens] == tuple(tokens[: match.tokens])
            assert len(stored.tokens) <= (len(match.blocks) + 1) * self.size

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.held + usage.cached == usage.total
        if not self.sequences:
            assert usage.held == 0
        found = {block: self.index.prefix(block) for block in self.stored}
        assert len(self.index) == len(self.stored)
        for block, stored in self.stored.items():
            assert found[block] == (stored.namespace, list(stored.tokens))
            here = contents(*found[block])[(len(stored.tokens) - 1) // self.size * self.size :]
            assert self.block(block)[: len(here)] == here, "a stored block was written to"
        self.check_pieces()

    def check_pieces(self) -> None:
        """Each stored block is told of once, and in the trie each token."""
        pieces = list(self.index.pieces())
        prefixes = {
            (stored.namespace, stored.tokens[:end])
            for stored in self.stored.values()
            for end in range(1, len(stored.tokens) + 1)
        }
        tokens = len(prefixes) if self.radix else len(self.stored) * self.size
        assert sum(piece.tokens for piece in pieces) == tokens
        ends = {p.block: (p.namespace, p.end) for p in pieces if p.block is not None}
        assert ends == {b: (s.namespace, len(s.tokens)) for b, s in self.stored.items()}
        last = {piece.block for piece in pieces if piece.last}
        assert last == {b for b, s in self.stored.items() if not self.continued(s)}


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_an_index_is_the_naive_one(index: str, block_size: int) -> None:
    machine = type("Machine", (IndexMachine,), {"index_name": index, "size": block_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
