"""Small random models with windows against transformers: `pytest -m transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracle.teacher_forcing import Distributions, agreement_of, texts
from support.tiny_windows import ARCHITECTURES, EXPECTED, TOKENS, window_folder

from trimaran.core.config import EngineConfig
from trimaran.core.errors import TrimaranError
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint
from trimaran.models.store import resolve

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_stored_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    import torch
    import transformers

    folder = window_folder(tmp_path / "m", architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    stored = np.array(json.loads(EXPECTED.read_text())[architecture])
    np.testing.assert_allclose(logits[::3], stored, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def gemma3_270m() -> Path:
    """The real model, where it is in the hub's cache or can be fetched (its licence must be
    accepted on the hub first)."""
    try:
        return resolve("google/gemma-3-270m")
    except TrimaranError as error:
        pytest.skip(f"nothing here was compared with the real Gemma 3: {error}")


def test_gemma3_270m(gemma3_270m: Path) -> None:
    """A text of several windows (512), computed in chunks of 256, against transformers."""
    import torch
    import transformers

    checkpoint = load_checkpoint(gemma3_270m)
    ids = checkpoint.tokenizer().encode("\n".join(texts().values()))[:1500]
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma3_270m, dtype=torch.float32)
    with torch.inference_mode():
        expected = Distributions.of(model(torch.tensor([list(ids)])).logits[0].numpy())
    config = EngineConfig(backend="native", weights="bf16", threads=2)
    backend = make_backend(checkpoint.model, config)
    agreement = agreement_of(backend, list(ids), expected)
    backend.close()
    assert agreement.greedy >= 0.97
