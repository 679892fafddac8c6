"""all-MiniLM-L6-v2 against transformers: the same tokens, the same vectors.

`minilm.json` holds what transformers 5.24 with torch 2.13 gave; the marked test makes it anew.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimaran.core.config import EngineConfig
from trimaran.core.request import Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.encoder_core import load_encoder_core

EXPECTED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "minilm.json").read_text(encoding="utf-8")
)
TOLERANCE = 1e-6
"""Of vectors of length 1: float32 sums in another order."""


def stored(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry["vector"]), "<f4")


def test_tokens_and_vectors(minilm_path: Path) -> None:
    core = load_encoder_core(minilm_path, EngineConfig(), lambda name: None)
    for entry in EXPECTED:
        ids = core.tokenizer.encode(entry["text"])
        assert ids == entry["ids"], entry["text"]
        core.add(Request(entry["text"], ids, SamplingParams()))
    found = {}
    while core.has_work:
        found |= {each.request.id: each.vector for each in core.step()}
    for entry in EXPECTED:
        np.testing.assert_allclose(found[entry["text"]], stored(entry), atol=TOLERANCE, rtol=0)


@pytest.mark.transformers
def test_what_is_stored_is_what_transformers_gives(minilm_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path)
    model = transformers.AutoModel.from_pretrained(minilm_path).eval()
    for entry in EXPECTED:
        inputs = tokenizer(entry["text"], return_tensors="pt", truncation=True, max_length=256)
        assert inputs.input_ids[0].tolist() == entry["ids"]
        with torch.no_grad():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        np.testing.assert_allclose((mean / mean.norm()).numpy(), stored(entry), atol=TOLERANCE)
