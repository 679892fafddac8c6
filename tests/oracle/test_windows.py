"""Small random models with windows against transformers: `pytest -m transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.tiny_windows import ARCHITECTURES, EXPECTED, TOKENS, window_folder

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
