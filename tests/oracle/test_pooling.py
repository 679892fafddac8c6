"""Vectors of the default model by pooling, beside llama.cpp's.

llama.cpp works on the file as it is, and in float32 on its dequantised weights: that is the
oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from oracle.float_gguf import write_float_gguf

from trimaran import LLM

xllamacpp = pytest.importorskip("xllamacpp")

TEXTS = [
    "A cat sits on the mat.",
    "It is sunny outside.",
    "def add(a, b):\n    return a + b\n",
    "The engine computes a step for all requests at once; " * 6,
]


Vectors = dict[str, npt.NDArray[Any]]
POOLINGS = ("mean", "last")


def llama_cpp(path: Path, floats: bool) -> Vectors:
    found = {}
    for pooling in POOLINGS:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.embedding = True
        kinds = xllamacpp.llama_pooling_type
        params.pooling_type = getattr(kinds, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
        if floats:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_parallel = 1
        params.cpuparams.n_threads = 2
        server = xllamacpp.Server(params)
        answer = server.handle_embeddings({"input": TEXTS, "encoding_format": "float"})
        found[pooling] = np.array([each["embedding"] for each in answer["data"]])
    return found


def own(path: Path, **options: Any) -> Vectors:
    with LLM(path, max_model_len=512, **options) as llm:
        return {
            pooling: np.stack(
                [each.outputs.embedding for each in llm.embed(TEXTS, pooling=pooling)]
            )
            for pooling in POOLINGS
        }


def distances(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """1 - the cosine, of each text."""
    wide = (a.astype(np.float64), b.astype(np.float64))
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in wide]
    found: npt.NDArray[np.float64] = 1 - (unit[0] * unit[1]).sum(axis=1)
    return found


def test_the_vectors_are_llama_cpps(smollm2_path: Path, tmp_path: Path) -> None:
    """On the file as it is llama.cpp rounds what goes into its products to 8 bits, and we to
    more: ours are to be the nearer ones to float32."""
    whole = tmp_path / "float32.gguf"
    write_float_gguf(smollm2_path, whole)
    oracle = llama_cpp(whole, floats=True)
    whole.unlink()
    peer, native = llama_cpp(smollm2_path, floats=False), own(smollm2_path)
    reference = own(smollm2_path, backend="reference")
    for pooling in POOLINGS:
        assert native[pooling].shape == oracle[pooling].shape == (len(TEXTS), 576)
        far = {
            name: distances(found[pooling], oracle[pooling])
            for name, found in (("reference", reference), ("native", native), ("peer", peer))
        }
        print(pooling, {name: float(found.max()) for name, found in far.items()})
        assert far["reference"].max() < 1e-9
        assert far["native"].max() < 3e-4
        assert far["native"].max() < far["peer"].max()
        # Those of different texts are far from each other.
        assert (distances(native[pooling], np.roll(oracle[pooling], 1, axis=0)) > 0.01).all()
