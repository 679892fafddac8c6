"""Next-token distributions of every back end against llama.cpp on the same weights.

The oracle computes in float32 on the file's dequantised weights. Thresholds are for all
texts together; what each text gave is printed (`pytest -rP`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle.teacher_forcing import Agreement, OracleText, agreement_of

from trimaran.core.config import EngineConfig
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint

# The reference back end computes one row at a time, so it reads less.
REFERENCE_POSITIONS = 120


def measure(
    config: EngineConfig, path: Path, texts: list[OracleText], positions: int | None = None
) -> Agreement:
    backend = make_backend(load_checkpoint(path).model, config)
    parts = []
    try:
        for text in texts:
            parts.append(agreement_of(backend, text.ids[:positions], text.distributions))
            print(f"{config.backend} {config.weights} {text.name}: {parts[-1]}")
    finally:
        backend.close()
    whole = Agreement.join(parts)
    print(f"{config.backend} {config.weights} in all: {whole}")
    return whole


def test_oracle_read_some_thousand_tokens(oracle_texts: list[OracleText]) -> None:
    assert sum(len(text.ids) for text in oracle_texts) > 4000


def test_reference(smollm2_path: Path, oracle_texts: list[OracleText]) -> None:
    config = EngineConfig(backend="reference")
    agreement = measure(config, smollm2_path, oracle_texts, REFERENCE_POSITIONS)
    assert agreement.positions == REFERENCE_POSITIONS * len(oracle_texts)
    assert agreement.greedy >= 0.995
    assert agreement.mean_kl < 1e-9
    assert agreement.max_kl < 1e-7


@pytest.mark.parametrize(
    ("weights", "activations", "greedy", "mean_kl", "max_kl"),
    [
        pytest.param("bf16", "auto", 0.99, 1e-3, 0.05, id="bf16"),
        pytest.param("int8", "auto", 0.97, 5e-3, 0.3, id="int8"),
        pytest.param("as-is", "auto", 0.97, 5e-3, 0.3, id="as-is"),
        pytest.param("as-is", "int8", 0.95, 6e-3, 0.3, id="activations"),
    ],
)
def test_native(
    smollm2_path: Path,
    oracle_texts: list[OracleText],
    weights: str,
    activations: str,
    greedy: float,
    mean_kl: float,
    max_kl: float,
) -> None:
    config = EngineConfig(backend="native", weights=weights, activations=activations, threads=2)
    agreement = measure(config, smollm2_path, oracle_texts)
    assert agreement.positions == sum(len(text.ids) for text in oracle_texts)
    assert agreement.greedy >= greedy
    assert agreement.mean_kl < mean_kl
    assert agreement.max_kl < max_kl
