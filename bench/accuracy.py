"""How far each precision is from float32: the figures of docs/accuracy.md.

    python bench/accuracy.py [--weights bf16,int8,as-is] [--kv bf16,int8]
        [--activations auto,int8] [--isa auto] [--threads 2] [--peer]

The oracle is llama.cpp in float32 on the dequantised weights of the default model
(`tests/oracle`); it and the engine read the same texts, some thousand tokens, and the
next-token distributions are compared at every position. `--peer` adds llama.cpp's own
arithmetic on the file as it is, with its KV cache in 16 bits. Prints a table; KL in nats.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from trimaran.core.config import EngineConfig
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint
from trimaran.models.store import resolve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle.float_gguf import write_float_gguf
from oracle.llama_cpp import LlamaCppOracle
from oracle.teacher_forcing import Agreement, Distributions, agreement_of, texts


def ask_oracle(path: Path) -> dict[str, tuple[list[int], Distributions]]:
    """Token ids and the oracle's distributions by text."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "float32.gguf"
        write_float_gguf(path, target)
        with LlamaCppOracle(target) as oracle:
            answers = {}
            for name, text in texts().items():
                ids = oracle.tokenize(text, parse_special=True)
                pieces = map(Distributions.of, oracle.pieces(ids))
                answers[name] = (ids, Distributions.join(pieces))
            return answers


def ours(
    path: Path, config: EngineConfig, answers: dict[str, tuple[list[int], Distributions]]
) -> dict[str, Agreement]:
    backend = make_backend(load_checkpoint(path).model, config)
    try:
        return {name: agreement_of(backend, ids, want) for name, (ids, want) in answers.items()}
    finally:
        backend.close()


def theirs(path: Path, answers: dict[str, tuple[list[int], Distributions]]) -> dict[str, Agreement]:
    with LlamaCppOracle(path, kv_type="f16") as peer:
        return {
            name: Agreement.between(want, peer.logits(ids)) for name, (ids, want) in answers.items()
        }


def rows(name: str, agreements: dict[str, Agreement]) -> Iterator[str]:
    """A row a text, then one for all."""
    parts = agreements | {"all": Agreement.join(list(agreements.values()))}
    for text, part in parts.items():
        yield (
            f"| {name} | {text} | {part.positions} | {part.greedy:.2%} | {part.mean_kl:.1e} "
            f"| {np.quantile(part.kl, 0.99):.1e} | {part.max_kl:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a GGUF model")
    parser.add_argument("--weights", default="bf16,int8,as-is")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    path = Path(resolve(args.model))
    answers = ask_oracle(path)
    print("| arithmetic | text | positions | greedy equal | KL mean | KL 99 % | KL largest |")
    print("|---|---|---|---|---|---|---|")
    choices = (args.weights, args.kv, args.activations)
    for weights, kv, activations in product(*(choice.split(",") for choice in choices)):
        config = EngineConfig(
            backend="native",
            weights=weights,
            kv=kv,
            activations=activations,
            isa=args.isa,
            threads=args.threads,
        )
        name = f"native {weights}, KV {kv}, activations {activations}"
        print(*rows(name, ours(path, config, answers)), sep="\n", flush=True)
    if args.peer:
        print(*rows("llama.cpp, file as it is", theirs(path, answers)), sep="\n")


if __name__ == "__main__":
    main()
