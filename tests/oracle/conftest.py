"""The oracle's answers, computed once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle.float_gguf import write_float_gguf
from oracle.llama_cpp import LlamaCppOracle
from oracle.teacher_forcing import Distributions, OracleText, texts


@pytest.fixture(scope="session")
def oracle_texts(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[OracleText]:
    """llama.cpp's float32 arithmetic on the weights of the default model."""
    path = tmp_path_factory.mktemp("oracle") / "float32.gguf"
    try:
        write_float_gguf(smollm2_path, path)
        with LlamaCppOracle(path) as oracle:
            return [
                OracleText(name, ids, Distributions.join(map(Distributions.of, oracle.pieces(ids))))
                for name, text in texts().items()
                for ids in [oracle.tokenize(text, parse_special=True)]
            ]
    finally:
        path.unlink(missing_ok=True)  # half a gigabyte
