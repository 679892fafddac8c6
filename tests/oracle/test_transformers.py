"""A Hugging Face folder against transformers: `pytest -m transformers`.

Needs torch and transformers beside the package, which the default tests do without.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle.hf_folder import write_hf_folder
from oracle.teacher_forcing import Agreement, Distributions, OracleText, agreement_of, texts

from trimaran.core.config import EngineConfig
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint

pytestmark = pytest.mark.transformers

REFERENCE_POSITIONS = 300


@pytest.fixture(scope="module")
def hf_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_hf_folder(smollm2_path, folder)
    return folder


@pytest.fixture(scope="module")
def transformers_texts(hf_folder: Path) -> list[OracleText]:
    """transformers' float32 distributions of the texts, as its tokenizer reads them."""
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(2)
    tokenizer = tokenizers.Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    answers = []
    for name, text in texts().items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        answers.append(OracleText(name, ids, Distributions.of(logits)))
    return answers


def measure(
    config: EngineConfig, path: Path, answers: list[OracleText], positions: int | None = None
) -> Agreement:
    backend = make_backend(load_checkpoint(path).model, config)
    try:
        whole = Agreement.join(
            [agreement_of(backend, text.ids[:positions], text.distributions) for text in answers]
        )
    finally:
        backend.close()
    print(f"{config.backend} {config.weights}: {whole}")
    return whole


def test_both_oracles_agree(
    transformers_texts: list[OracleText], oracle_texts: list[OracleText]
) -> None:
    for ours, theirs in zip(transformers_texts, oracle_texts, strict=True):
        assert ours.ids == theirs.ids
        assert (ours.distributions.ids[:, 0] == theirs.distributions.ids[:, 0]).mean() > 0.999
        top = abs(ours.distributions.logprobs[:, 0] - theirs.distributions.logprobs[:, 0])
        assert top.max() < 1e-3


def test_tokens(hf_folder: Path, transformers_texts: list[OracleText]) -> None:
    tokenizer = load_checkpoint(hf_folder).tokenizer()
    for answer in transformers_texts:
        encoded = tokenizer.encode(texts()[answer.name], add_special_tokens=False)
        assert list(encoded) == answer.ids


def test_reference(hf_folder: Path, transformers_texts: list[OracleText]) -> None:
    config = EngineConfig(backend="reference")
    agreement = measure(config, hf_folder, transformers_texts, REFERENCE_POSITIONS)
    assert agreement.greedy >= 0.995
    assert agreement.max_kl < 1e-7


@pytest.mark.parametrize(("weights", "greedy"), [("bf16", 0.99), ("int8", 0.97)])
def test_native(
    hf_folder: Path, transformers_texts: list[OracleText], weights: str, greedy: float
) -> None:
    config = EngineConfig(backend="native", weights=weights, threads=2)
    agreement = measure(config, hf_folder, transformers_texts)
    assert agreement.greedy >= greedy
