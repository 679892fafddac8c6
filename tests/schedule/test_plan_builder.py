"""Plans against the plain definition, row by row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.manager import KVCacheManager
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams
from trimaran.schedule.plan_builder import PlanBuilder
from trimaran.schedule.selection import Selection

PARTS = st.lists(
    st.tuples(
        st.integers(0, 9),  # tokens computed
        st.integers(1, 6),  # tokens in the step
        st.sampled_from([0, 0, 3]),  # tokens left after it
        st.booleans(),  # scores its prompt
        st.integers(0, 2),  # of its tokens, how many are output
    ),
    min_size=1,
    max_size=6,
)


@given(parts=PARTS, size=st.sampled_from([1, 4, 16]), decodes=st.booleans())
def test_plan_rows(parts: list[tuple[int, int, int, bool, int]], size: int, decodes: bool) -> None:
    kv = KVCacheManager(200, size)
    columns: list[tuple[Sequence, int, int, int, int, int]] = []
    for number, (start, count, left, scored, output) in enumerate(parts):
        count = 1 if decodes else count
        tokens = [100 * number + place for place in range(start + count + left)]
        prompt = tokens[: max(1, len(tokens) - output)]
        params = SamplingParams(prompt_logprobs=0 if scored else None)
        sequence = Sequence(Request(str(number), prompt, params), 0, tokens)
        assert kv.admit(sequence, kv.no_match(sequence), len(tokens))
        sequence.computed = start
        columns.append((sequence, number, kv.row(sequence), start, count + left, count))
    chosen = Selection.of(columns)
    alike = all(count == want == 1 for *_, want, count in columns)
    chosen.decodes = alike and not any(part[3] for part in parts)
    step = PlanBuilder(kv).build(chosen)
    entries, plan = step.entries, step.plan

    row = logit = 0
    sampling: list[tuple[Sequence, int]] = []
    logit_rows: list[int] = []
    width = -(-int(max(plan.contexts)) // size)
    assert plan.block_tables.shape == (len(parts), width)
    assert (plan.rows, plan.sequences) == (sum(chosen.counts), len(parts))
    for number, (entry, sequence) in enumerate(zip(entries, chosen.sequences, strict=True)):
        start, count = chosen.starts[number], chosen.counts[number]
        table = kv.block_table(sequence)
        padded = [*table, *[-1] * width][:width]
        assert plan.block_tables[number].tolist() == padded
        assert plan.row_starts[number : number + 2].tolist() == [row, row + count]
        assert plan.contexts[number] == start + count
        for place in range(start, start + count):
            assert plan.positions[row] == place
            assert plan.tokens[row] == sequence.tokens[place]
            assert plan.slots[row] == table[place // size] * size + place % size
            row += 1
        samples = start + count == sequence.total
        scores = sequence.request.params.prompt_logprobs is not None and not sequence.output
        wanted = count if scores else int(samples)
        logit_rows += range(row - wanted, row)
        assert (entry.sequence, entry.start, entry.count) == (sequence, start, count)
        assert entry.samples == samples
        assert entry.logits == slice(logit, logit + wanted)
        logit += wanted
        if samples:
            sampling.append((sequence, logit - 1))
    assert plan.logit_rows.tolist() == logit_rows
    assert list(step.sampling()) == sampling
    assert step.scoring == (len(logit_rows) > len(sampling) or step.scoring)
    wants = [want for *_, want, _ in columns]
    assert step.decode_tokens == wants.count(1)
    assert step.prefill_tokens + step.decode_tokens == plan.rows
    assert plan.copies.shape == (0, 2)
    for array in (plan.tokens, plan.positions, plan.slots, plan.row_starts, plan.contexts,
                  plan.block_tables, plan.logit_rows, plan.copies):  # fmt: skip
        assert array.dtype == "int32"
        assert array.flags.c_contiguous
