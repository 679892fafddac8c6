"""Many more requests than the KV cache can hold: all finish, and as if each were alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

from trimaran import LLM, SamplingParams

KV_BYTES = 30 * 2 * 3 * 64 * 2  # a token in 30 layers, K and V, 3 heads of 64, bf16


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_256_prompts_in_memory_for_a_quarter_of_them(smollm2_path: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(300, 40000) for _ in range(rng.randint(1, 60))] for _ in range(256)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(4, 20), ignore_eos=True)
        for _ in prompts
    ]
    wanted = sum(len(p) + (own.max_tokens or 0) for p, own in zip(prompts, params, strict=True))
    cache_bytes = wanted // 4 * KV_BYTES
    with LLM(
        smollm2_path, backend="native", kv_cache_bytes=cache_bytes, max_num_seqs=256
    ) as crowded:
        before = resident_bytes()
        together = crowded.generate(prompts, params)
        grown = resident_bytes() - before
    assert sum(o.metrics.preemptions for o in together if o.metrics) > 0
    # The cache is touched as it fills; beyond it there are only the requests themselves.
    assert grown < cache_bytes + (96 << 20)
    with LLM(
        smollm2_path, backend="native", kv_cache_bytes=512 * KV_BYTES, max_num_seqs=1
    ) as alone:
        expected = alone.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in expected]
