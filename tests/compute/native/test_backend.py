"""The native back end as a whole: against the reference, and against itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.plans import Line, make_plan, step
from support.quantized import BLOCK_TYPES, K_TYPES, mixed_model, quantized_model
from support.tiny import ArrayStorage, tiny_config, tiny_model

from trimaran.compute.backend import Backend
from trimaran.compute.native.backend import NativeBackend, available_isas
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import BackendError, CapacityError
from trimaran.core.step_plan import Float32
from trimaran.models.load import load_checkpoint
from trimaran.models.model import Model
from trimaran.models.qwen2 import Qwen2Model, expected_tensors
from trimaran.models.weight import Weight

ISAS = available_isas()
TOKENS = np.random.default_rng(7).integers(0, 256, 90).tolist()


def run_alone(backend: Backend, tokens: list[int], block_size: int = 16) -> Float32:
    """Logits of every token, in one step."""
    blocks = -(-len(tokens) // block_size)
    backend.allocate_cache(blocks, block_size)
    line = Line(tokens, list(range(blocks)))
    step(backend, [(line, len(tokens))], block_size)
    return np.array(line.logits)


def assert_near(native: Float32, reference: Float32, tolerance: float) -> None:
    """Within a share of the logits' own spread, on the average and nearly everywhere."""
    error = np.abs(native - reference) / reference.std()
    assert error.mean() < tolerance
    assert np.quantile(error, 0.99) < 5 * tolerance


def qwen2_model() -> Model:
    config = tiny_config(architecture="qwen2", attention_bias=True)
    rng = np.random.default_rng(3)
    weights = {}
    for name, shape in expected_tensors(config).items():
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif len(shape) == 2 and "embed" not in name:
            values *= 2.0 / np.sqrt(shape[-1])
        weights[name] = Weight(name, shape, ArrayStorage(values))
    return Qwen2Model(config, weights)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_near_the_reference_on_the_files_own_weights(isa: str, type_name: str) -> None:
    """What is left are activations in 12 bits, in 8, or all in bf16, and a cache in bf16."""
    model = quantized_model(type_name)
    expected = run_alone(ReferenceBackend(model), TOKENS)
    # Random codes make some logits many times as large as others.
    spread = 2 if type_name in K_TYPES else 1
    for activations, tolerance in (("auto", 0.01), ("int8", 0.04)):
        backend = NativeBackend(model, isa=isa, threads=2, activations=activations)
        found = run_alone(backend, TOKENS)
        assert_near(found, expected, spread * (0.03 if isa == "amx" else tolerance))


@pytest.mark.parametrize("isa", ISAS)
def test_gates_of_another_type_than_what_they_gate(isa: str) -> None:
    model = mixed_model({"gate_proj": "Q8_0"})
    native = run_alone(NativeBackend(model, isa=isa, threads=2), TOKENS)
    assert_near(native, run_alone(ReferenceBackend(model), TOKENS), 0.03)
    alone = run_alone(NativeBackend(model, isa=isa, threads=1), TOKENS[:3])
    np.testing.assert_array_equal(alone, native[:3])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("weights", "tolerance"), [("bf16", 0.025), ("int8", 0.04)])
def test_near_the_reference_with_converted_weights(
    isa: str, weights: str, tolerance: float
) -> None:
    for model in (tiny_model(1), tiny_model(2, tie_word_embeddings=True), qwen2_model()):
        native = run_alone(NativeBackend(model, weights=weights, isa=isa, threads=2), TOKENS)
        assert_near(native, run_alone(ReferenceBackend(model), TOKENS), tolerance)


@pytest.fixture(scope="module")
def real_model(smollm2_path: Path) -> Model:
    return load_checkpoint(smollm2_path).model


@pytest.fixture(scope="module")
def real_logits(real_model: Model) -> tuple[list[int], Float32]:
    """Some tokens, and the reference's logits of them."""
    tokens = np.random.default_rng(0).integers(1000, 20000, 10).tolist()
    return tokens, run_alone(ReferenceBackend(real_model), tokens)


@pytest.mark.parametrize(
    ("weights", "tolerance", "equal"),
    [("as-is", 0.06, 0.9), ("bf16", 0.05, 0.9), ("int8", 0.08, 0.9), ("int4", 0.3, 0.6)],
)
def test_near_the_reference_on_a_real_model(
    real_model: Model,
    real_logits: tuple[list[int], Float32],
    weights: str,
    tolerance: float,
    equal: float,
) -> None:
    tokens, reference = real_logits
    native = run_alone(NativeBackend(real_model, weights=weights), tokens)
    assert_near(native, reference, tolerance)
    assert np.mean(native.argmax(axis=1) == reference.argmax(axis=1)) >= equal


def test_tiers_with_fused_operations_give_equal_bits() -> None:
    """All but amx, whose attention works on tiles."""
    model = quantized_model("Q4_1")
    fused = [isa for isa in ISAS if isa in ("avx2", "avx512")]
    for kv in ("bf16", "int8"):
        results = [run_alone(NativeBackend(model, isa=isa, kv=kv), TOKENS) for isa in fused]
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


def in_company(backend: Backend, tokens: list[int], block_size: int, seed: int) -> Float32:
    """Logits of `tokens` computed in chunks of odd sizes, among other sequences that come
    and go, in blocks scattered over the cache."""
    rng = np.random.default_rng(seed)
    blocks = rng.permutation(40 * 128 // block_size).tolist()
    backend.allocate_cache(len(blocks), block_size)

    def line(length: int) -> Line:
        own = [blocks.pop() for _ in range(-(-length // block_size))]
        return Line(rng.integers(0, 256, length).tolist(), own)

    mine = dataclasses.replace(line(len(tokens)), tokens=tokens)
    others = [line(int(rng.integers(1, 120))) for _ in range(30)]
    while mine.computed < len(tokens):
        chosen = [other for other in others if rng.random() < 0.3] + [mine]
        chunks = []
        for chunk in rng.permutation(len(chosen)):
            left = len(chosen[chunk].tokens) - chosen[chunk].computed
            if left:
                chunks.append((chosen[chunk], int(rng.integers(1, min(left, 37) + 1))))
        step(backend, chunks, block_size)
    return np.array(mine.logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "bf16", "int8", "int4"])
def test_logits_do_not_depend_on_the_batch(isa: str, kind: str) -> None:
    as_is = kind.startswith("Q")
    model = quantized_model(kind) if as_is else tiny_model(5)
    weights = "as-is" if as_is else kind
    alone = run_alone(NativeBackend(model, weights=weights, isa=isa, threads=1), TOKENS)
    for threads, block_size in ((1, 4), (2, 8), (3, 16), (4, 32)):
        backend = NativeBackend(model, weights=weights, isa=isa, threads=threads)
        batched = in_company(backend, TOKENS, block_size, seed=threads)
        np.testing.assert_array_equal(batched, alone)


@pytest.mark.parametrize("isa", [ISAS[-1]])
def test_logits_of_a_real_model_do_not_depend_on_the_batch(real_model: Model, isa: str) -> None:
    backend = NativeBackend(real_model, isa=isa)
    tokens = np.random.default_rng(1).integers(0, 49152, 270).tolist()  # two attention chunks
    alone = run_alone(backend, tokens)
    np.testing.assert_array_equal(in_company(backend, tokens, 16, seed=2), alone)
    one_thread = NativeBackend(real_model, isa=isa, threads=1)
    np.testing.assert_array_equal(in_company(one_thread, tokens, 32, seed=3), alone)


def test_copied_blocks_hold_what_their_sources_do() -> None:
    backend = NativeBackend(tiny_model(), threads=2)
    backend.allocate_cache(8, 8)
    line = Line(TOKENS[:14], [0, 1])
    step(backend, [(line, 13)], 8)
    fork = Line(line.tokens, [5, 6], computed=13)
    logits = backend.run(make_plan([(fork, 1)], 8, copies=[(0, 5), (1, 6)])).copy()
    step(backend, [(line, 1)], 8)
    np.testing.assert_array_equal(logits[0], line.logits[-1])


def test_logits_only_of_the_rows_that_are_wanted() -> None:
    backend = NativeBackend(tiny_model(), threads=2)
    every = run_alone(backend, TOKENS)
    plan = make_plan([(Line(TOKENS, list(range(6))), len(TOKENS))], 16)
    wanted = np.array([3, 17, 89], np.int32)
    logits = backend.run(dataclasses.replace(plan, logit_rows=wanted))
    np.testing.assert_array_equal(logits, every[wanted])
    none = backend.run(dataclasses.replace(plan, logit_rows=wanted[:0]))
    assert none.shape == (0, 260)


def test_logits_outlive_the_memory_of_their_step() -> None:
    backend = NativeBackend(tiny_model(), threads=1)
    backend.allocate_cache(64, 16)
    first = backend.run(make_plan([(Line(TOKENS, list(range(6))), 1)], 16))
    backend.run(make_plan([(Line(TOKENS, list(range(6))), 90)], 16))  # needs more memory
    backend.close()
    assert np.isfinite(first).all()


def broken_plans() -> list[tuple[str, dict[str, object]]]:
    def array(*values: object) -> np.ndarray:
        return np.array(values, np.int32)

    return [
        ("tokens", {"tokens": array(0, 1, 2, 260)}),
        ("tokens", {"tokens": array(-1, 1, 2, 3)}),
        ("positions", {"positions": array(0, 1, 3, 4)}),
        ("positions", {"positions": array(-1, 0, 1, 2)}),
        ("positions", {"positions": array(0, 1, 2)}),
        ("slots", {"slots": array(0, 1, 2, 64)}),
        ("slots", {"slots": array(0, 1, 2, -1)}),
        ("row_starts", {"row_starts": array(1, 4)}),
        ("row_starts", {"row_starts": array(0, 3), "contexts": array(3)}),
        ("row_starts", {"row_starts": array(0, 5)}),
        ("row_starts", {"row_starts": array(0)}),
        ("contexts", {"contexts": array(5)}),
        ("contexts", {"block_tables": np.zeros((1, 0), np.int32)}),
        ("block_tables", {"block_tables": array([8])}),
        ("block_tables", {"block_tables": array([-1])}),
        ("block_tables", {"block_tables": array([0], [1])}),
        ("logit_rows", {"logit_rows": array(4)}),
        ("logit_rows", {"logit_rows": array(0, 0, 1, 2, 3)}),
        ("copies", {"copies": array([0, 8])}),
        ("copies", {"copies": array([0, 1, 2])}),
        ("int32", {"tokens": np.zeros(4, np.int64)}),
        ("int32", {"positions": np.zeros((2, 2), np.int32)}),
    ]


@pytest.mark.parametrize(("named", "changes"), broken_plans())
def test_unsound_plans_are_refused(named: str, changes: dict[str, object]) -> None:
    backend = NativeBackend(tiny_model(), threads=1, max_rows=16)
    backend.allocate_cache(8, 8)
    line = Line(TOKENS, [0, 1])
    plan = make_plan([(line, 4)], 8)
    before = backend.run(plan).copy()
    with pytest.raises(BackendError, match=named):
        backend.run(dataclasses.replace(plan, **changes))
    np.testing.assert_array_equal(backend.run(plan), before)


def test_more_rows_than_the_back_end_was_made_for() -> None:
    backend = NativeBackend(tiny_model(), threads=1, max_rows=16)
    backend.allocate_cache(8, 8)
    with pytest.raises(BackendError, match="17 rows"):
        backend.run(make_plan([(Line(TOKENS, list(range(8))), 17)], 8))


def test_a_back_end_without_cache_or_closed_refuses_steps() -> None:
    backend = NativeBackend(tiny_model(), threads=1)
    plan = make_plan([(Line(TOKENS, [0]), 1)], 16)
    with pytest.raises(BackendError, match="not allocated"):
        backend.run(plan)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.run(plan)
    assert backend.describe()["kv_cache_bytes"] == 0


def test_options_that_cannot_be_had_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(BackendError, match="isa is 'sse9'"):
        NativeBackend(model, isa="sse9")
    with pytest.raises(BackendError, match="weights is 'int3'"):
        NativeBackend(model, weights="int3")
    backend = NativeBackend(model, threads=1)
    with pytest.raises(BackendError, match="block_size is 5"):
        backend.allocate_cache(8, 5)
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        backend.allocate_cache(1 << 27, 8)
    with pytest.raises(CapacityError, match="max_num_batched_tokens"):
        NativeBackend(model, max_rows=2**31 - 64)
    with pytest.raises(BackendError, match="head_dim"):
        NativeBackend(tiny_model(head_dim=24))


def test_describes_itself() -> None:
    backend = NativeBackend(quantized_model("Q4_1"), threads=2, isa="portable")
    backend.allocate_cache(4, 8)
    described = backend.describe()
    assert described["isa"] == "portable"
    assert described["threads"] == 2
    assert described["weight_formats"] == {"Q4_1": 16}
    assert described["kv_cache_bytes"] == 4 * 8 * backend.kv_bytes_per_token()
    backend.time_phases(True)
    backend.run(make_plan([(Line(TOKENS, [0]), 5)], 8))
    seconds = backend.phase_seconds()
    assert {"rows", "attention", "linear 64 -> 260"} <= set(seconds)
    assert all(value >= 0 for value in seconds.values())
