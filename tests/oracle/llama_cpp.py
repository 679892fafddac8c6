"""llama.cpp as an oracle: logits of every position of a token sequence, in one decode.

The `xllamacpp` wheel is one shared object that exports llama.cpp's C interface, so it is
called directly through ctypes. Its own Python interface is a server, which gives
probabilities of generated tokens only: one request a position.

The two parameter structures are passed by value. Here each is a blob larger than the
structure: the library fills in its defaults, this module sets a few fields at known
offsets, and the surplus bytes lie unread behind the last argument on the stack (System V
x86-64 and AArch64 pass such structures in memory; AArch64 by reference). `_check_layout`
compares the defaults at those offsets with the documented ones, and every context is
asked for its dimensions after it is made, so a library with another layout is refused
and never misread.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

# Of enum ggml_type.
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30}
# Of enum llama_flash_attn_type.
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

CHUNK = 128
"""Positions of one decode: their activations stay in a core's cache."""

# Field: (offset, ctypes type, default) of llama_context_params.
_CONTEXT_FIELDS: dict[str, tuple[int, type[ctypes._SimpleCData[int]], int]] = {
    "n_ctx": (0, ctypes.c_uint32, 512),
    "n_batch": (4, ctypes.c_uint32, 2048),
    "n_ubatch": (8, ctypes.c_uint32, 512),
    "n_seq_max": (12, ctypes.c_uint32, 1),
    "n_outputs_max": (20, ctypes.c_uint32, 0),
    "n_outputs_max_per_seq": (24, ctypes.c_uint32, 1),
    "n_threads": (28, ctypes.c_int32, 4),
    "n_threads_batch": (32, ctypes.c_int32, 4),
    "flash_attn_type": (52, ctypes.c_int32, FLASH_ATTENTION["auto"]),
    "type_k": (104, ctypes.c_int32, KV_TYPES["f16"]),
    "type_v": (108, ctypes.c_int32, KV_TYPES["f16"]),
}


class _Blob(ctypes.Structure):
    """Room for a structure of parameters whose whole layout isn't needed."""

    _fields_ = [("bytes", ctypes.c_uint8 * 512)]

    def get(self, name: str) -> int:
        offset, kind, _ = _CONTEXT_FIELDS[name]
        return kind.from_buffer(self, offset).value

    def set(self, name: str, value: int) -> None:
        offset, kind, _ = _CONTEXT_FIELDS[name]
        kind.from_buffer(self, offset).value = value


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LogCallback
def _drop_log(level: int, text: bytes, data: int | None) -> None:
    pass


_SIGNATURES = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LogCallback, ctypes.c_void_p]),
    "llama_model_default_params": (_Blob, []),
    "llama_context_default_params": (_Blob, []),
    "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, _Blob]),
    "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, _Blob]),
    "llama_model_get_vocab": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_tokenize": (
        ctypes.c_int32,
        [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ],
    ),
    "llama_batch_init": (_Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
    "llama_get_memory": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_memory_clear": (None, [ctypes.c_void_p, ctypes.c_bool]),
    "llama_n_ctx": (ctypes.c_uint32, [ctypes.c_void_p]),
    "llama_n_batch": (ctypes.c_uint32, [ctypes.c_void_p]),
    "llama_n_ubatch": (ctypes.c_uint32, [ctypes.c_void_p]),
    "llama_n_seq_max": (ctypes.c_uint32, [ctypes.c_void_p]),
    "llama_n_threads": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_n_threads_batch": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_free": (None, [ctypes.c_void_p]),
    "llama_model_free": (None, [ctypes.c_void_p]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    # OpenMP reads it when it is loaded: threads that wait for one another on a machine that
    # others use too sleep, and don't spin away the time that the last one needs.
    passive = {"OMP_WAIT_POLICY": "passive"} if "OMP_WAIT_POLICY" not in os.environ else {}
    os.environ.update(passive)
    import xllamacpp

    for name in passive:
        del os.environ[name]
    lib = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    _check_layout(lib.llama_context_default_params(), xllamacpp.__version__)
    lib.llama_log_set(_drop_log, None)
    lib.llama_backend_init()
    return lib


def _check_layout(defaults: _Blob, version: str) -> None:
    for name, (offset, _, expected) in _CONTEXT_FIELDS.items():
        if defaults.get(name) != expected:
            raise RuntimeError(
                f"xllamacpp {version}: llama_context_params.{name} at byte {offset} is "
                f"{defaults.get(name)} by default, not {expected}; its layout has changed, "
                "correct the offsets in tests/oracle/llama_cpp.py"
            )


class LlamaCppOracle:
    """A model in llama.cpp.

    Args:
        path: a GGUF file.
        threads: compute threads.
        n_ctx: longest sequence in tokens.
        kv_type: "f32", "f16" or "bf16".
        flash_attention: "off", "on" or "auto".

    Raises:
        RuntimeError: llama.cpp can't load the file or make the context.
    """

    def __init__(
        self,
        path: str | Path,
        threads: int = 2,
        n_ctx: int = 2048,
        kv_type: str = "f32",
        flash_attention: str = "off",
    ) -> None:
        self._lib = lib = _library()
        self._model: int | None = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        self._context: int | None = None
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self._vocab)
        self._chunk = min(CHUNK, n_ctx)
        params = lib.llama_context_default_params()
        wanted = {
            "n_ctx": n_ctx,
            "n_batch": self._chunk,
            "n_ubatch": self._chunk,
            "n_seq_max": 1,
            "n_outputs_max": self._chunk,
            "n_outputs_max_per_seq": self._chunk,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn_type": FLASH_ATTENTION[flash_attention],
            "type_k": KV_TYPES[kv_type],
            "type_v": KV_TYPES[kv_type],
        }
        for name, value in wanted.items():
            params.set(name, value)
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise RuntimeError(f"llama.cpp can't make a context of {n_ctx} tokens for {path}")
        # It pads the context to a multiple of 256, and tells.
        self.n_ctx: int = lib.llama_n_ctx(self._context)
        self._check_context(wanted)

    def _check_context(self, wanted: dict[str, int]) -> None:
        made = {
            name: getattr(self._lib, f"llama_{name}")(self._context)
            for name in ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
        }
        asked = {name: wanted[name] for name in made}
        if made != asked or self.n_ctx < wanted["n_ctx"]:
            self.close()
            raise RuntimeError(f"llama.cpp was asked for {asked} and made {made}")

    def tokenize(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of `text`, without the ones a model puts around a prompt.

        Args:
            parse_special: whether special tokens written out become those tokens.
        """
        raw = text.encode()
        room = len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(
            self._vocab, raw, len(raw), ids, room, False, parse_special
        )
        if count < 0:
            raise RuntimeError(f"llama.cpp can't tokenize {text!r}: {count}")
        return list(ids[:count])

    def logits(self, token_ids: Sequence[int]) -> Float32:
        """[T, vocab] logits after each token, `token_ids` being a whole sequence.

        Raises:
            ValueError: no tokens, or more than `n_ctx`.
        """
        return np.concatenate([piece.copy() for piece in self.pieces(token_ids)])

    def pieces(self, token_ids: Sequence[int]) -> Iterator[Float32]:
        """The same some positions after others, [t, vocab]; each is overwritten by the next."""
        if not 1 <= len(token_ids) <= self.n_ctx:
            raise ValueError(f"{len(token_ids)} tokens; give 1 to {self.n_ctx}")
        self._clear()
        out = np.empty((min(len(token_ids), self._chunk), self.vocab_size), np.float32)
        for start in range(0, len(token_ids), self._chunk):
            part = token_ids[start : start + self._chunk]
            self._decode(part, start, out[: len(part)])
            yield out[: len(part)]

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> tuple[Int64, Float32]:
        """Of each position the `k` most likely next tokens.

        Returns:
            ids [T, k] and log-probabilities [T, k], most likely first.
        """
        logits = self.logits(token_ids)
        ids = np.argpartition(logits, -k, axis=1)[:, -k:]
        top = np.take_along_axis(logits, ids, axis=1)
        order = np.argsort(-top, axis=1, kind="stable")
        peak = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - peak).sum(axis=1, keepdims=True, dtype=np.float64))
        logprobs = np.take_along_axis(top, order, axis=1) - peak - total
        return np.take_along_axis(ids, order, axis=1), logprobs.astype(np.float32)

    def greedy(self, token_ids: Sequence[int], n: int) -> list[int]:
        """The `n` most likely tokens, one after another, after `token_ids`."""
        row = self.logits(token_ids)[-1:]
        tokens: list[int] = []
        while len(tokens) < n:
            tokens.append(int(row[0].argmax()))
            if len(tokens) < n:
                self._decode(tokens[-1:], len(token_ids) + len(tokens) - 1, row)
        return tokens

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _decode(self, tokens: Sequence[int], start: int, out: Float32) -> None:
        """Puts `tokens` at positions from `start` on; their logits go into `out` [t, vocab]."""
        lib = self._lib
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = 1
            code = lib.llama_decode(self._context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode gave {code} at position {start}")
            for i in range(len(tokens)):
                row = lib.llama_get_logits_ith(self._context, i)
                out[i] = np.ctypeslib.as_array(row, (self.vocab_size,))
        finally:
            lib.llama_batch_free(batch)

    def close(self) -> None:
        """Frees the model; may be called twice."""
        if self._context:
            self._lib.llama_free(self._context)
            self._context = None
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
