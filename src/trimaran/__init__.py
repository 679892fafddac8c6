"""Trimaran: an LLM inference engine whose design decisions are composable policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimaran.core.config import EngineConfig
from trimaran.core.errors import TrimaranError
from trimaran.core.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    SequenceDelta,
)
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimaran.engine.async_engine import AsyncEngine
    from trimaran.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "RequestOutput",
    "Retention",
    "SamplingParams",
    "SequenceDelta",
    "TrimaranError",
]


def __getattr__(name: str) -> Any:
    """Loads the engine at first use, so that importing the vocabulary stays quick."""
    if name == "LLM":
        from trimaran.engine.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from trimaran.engine.async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module 'trimaran' has no attribute '{name}'")
