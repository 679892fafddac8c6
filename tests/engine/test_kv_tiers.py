"""Lower tiers of the KV cache on the real model: they change no token, whatever befalls them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import tiny_model, tiny_tokenizer

from trimaran import LLM, EngineConfig, RequestOutput, SamplingParams
from trimaran.cache.tiers import TierUsage
from trimaran.compute.backend import Backend
from trimaran.compute.native.backend import NativeBackend
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import SystemClock
from trimaran.core.errors import BackendError, ConfigError
from trimaran.core.request import Request
from trimaran.engine.core import EngineCore
from trimaran.engine.factory import LoadedModel, make_core
from trimaran.schedule import loading
from trimaran.schedule.cost_model import StepCostModel

BF16_BYTES = 30 * 2 * 3 * 64 * 2  # a token in 30 layers, K and V, 3 heads of 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
PREFIX = [random.Random(1).randrange(300, 40000) for _ in range(200)]


def engine(path: Path, tokens: int = 1024, **options: Any) -> LLM:
    return LLM(path, backend="native", kv_cache_bytes=tokens * BF16_BYTES, **options)


def prompts(count: int, first: int = 0) -> list[list[int]]:
    return [[*PREFIX[: 150 + i % 3 * 20], 1000 + i] for i in range(first, first + count)]


def told(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, to be compared exactly."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def usage(llm: LLM) -> TierUsage:
    waits = llm._core.scheduler.loading
    assert waits is not None
    return waits.tiers.usage()


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are always worth it, however slow the machine is at the moment."""
    monkeypatch.setattr(StepCostModel, "prefill_seconds", lambda self, start, count: 1.0 * count)
    monkeypatch.setattr(loading, "MAX_SECONDS", 200.0)


# ---------------------------------------------------------------------- blocks as bytes


def backends() -> list[Backend]:
    model = tiny_model()
    return [
        ReferenceBackend(model),
        NativeBackend(model, threads=1),
        NativeBackend(model, threads=1, kv="int8"),
    ]


@pytest.mark.parametrize("number", range(3))
def test_blocks_are_read_and_written_as_bytes(number: int) -> None:
    backend = backends()[number]
    assert backend.kv_block_bytes() == 0
    backend.allocate_cache(6, 8)
    size = backend.kv_block_bytes()
    assert size == 8 * backend.kv_bytes_per_token()
    data = np.random.default_rng(0).integers(0, 256, (3, size), dtype=np.uint8)
    backend.write_blocks(np.array([4, 0, 2], np.int32), data)
    read = np.ones((4, size), np.uint8)
    backend.read_blocks(np.array([2, 3, 4, 0], np.int32), read)
    assert (read[0] == data[2]).all() and (read[1] == 0).all()
    assert (read[2] == data[0]).all() and (read[3] == data[1]).all()
    for blocks, shape in (([6], 1), ([-1], 1), ([0, 1], 1), ([0], 2)):
        with pytest.raises(BackendError):
            backend.read_blocks(np.array(blocks, np.int32), np.zeros((shape, size), np.uint8))
        with pytest.raises(BackendError):
            backend.write_blocks(np.array(blocks, np.int32), np.zeros((shape, size), np.uint8))
    with pytest.raises(BackendError):
        backend.read_blocks(np.array([0], np.int32), np.zeros((1, size - 1), np.uint8))
    backend.close()


def test_fingerprints_differ_by_whatever_changes_the_bits() -> None:
    def of(backend: Backend, size: int = 8) -> bytes:
        backend.allocate_cache(4, size)
        found = backend.kv_fingerprint()
        backend.close()
        return found

    model, other = tiny_model(), tiny_model(1)
    kinds = [
        of(ReferenceBackend(model)), of(ReferenceBackend(other)), of(ReferenceBackend(model), 4),
        of(NativeBackend(model)), of(NativeBackend(other)), of(NativeBackend(model), 4),
        of(NativeBackend(model, kv="int8")), of(NativeBackend(model, weights="int8")),
        of(NativeBackend(model, isa="portable")),
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)
    assert kinds[0] == of(ReferenceBackend(tiny_model()))
    assert kinds[3] == of(NativeBackend(tiny_model(), threads=2))


# ---------------------------------------------------------------------- tokens stay


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"block_size": 32}, {"block_size": 4}])
def test_bit_equal_over_a_restart(smollm2_path: Path, tmp_path: Path, options: Any) -> None:
    with engine(smollm2_path, prefix_cache=False, **options) as llm:
        expected = told(llm.generate(prompts(4), PARAMS))
    disk = {"kv_disk_path": str(tmp_path), **options}
    with engine(smollm2_path, **disk) as llm:
        for _ in range(2):
            assert told(llm.generate(prompts(4), PARAMS)) == expected
        assert usage(llm).loaded == 0
    with engine(smollm2_path, **disk) as llm:
        outputs = llm.generate(prompts(4), PARAMS)
        assert told(outputs) == expected
        assert usage(llm).loaded > 0
        size = options.get("block_size", 16)
        assert all(o.cached_tokens >= 150 - 2 * size for o in outputs)


def test_bit_equal_on_the_reference_back_end_over_a_restart(tmp_path: Path) -> None:
    config = EngineConfig(
        backend="reference", block_size=4, kv_disk_path=str(tmp_path), kv_cache_bytes=1 << 20
    )
    found = []
    for _ in range(2):
        model = tiny_model()
        loaded = LoadedModel(model.config, tiny_tokenizer(), None, ReferenceBackend(model))
        core = make_core(loaded, config, SystemClock())
        for turn in range(2):
            found.append(run_core(core, list(range(40)), turn))
        waits = core.scheduler.loading
        assert waits is not None
        loaded_blocks = waits.tiers.usage().loaded
        core.close()
    assert found == found[:1] * 4
    assert loaded_blocks == 9


def run_core(core: EngineCore, prompt: list[int], turn: int) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    core.add(Request(f"r{turn}", prompt, params))
    tokens: list[int] = []
    end = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < end
        for delta in core.step():
            tokens += delta.token_ids
    return tokens


@pytest.mark.parametrize("host_mib", [0, 8, 64])
@pytest.mark.parametrize("disk", [False, True])
def test_bit_equal_under_pressure(
    smollm2_path: Path, tmp_path: Path, host_mib: int, disk: bool
) -> None:
    many = prompts(12)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=1, ignore_eos=True)
    with engine(smollm2_path, tokens=4096, prefix_cache=False) as llm:
        expected = told(llm.generate(many, params))
    options: dict[str, Any] = {"kv_host_bytes": host_mib << 20}
    if disk:
        options["kv_disk_path"] = str(tmp_path)
    with engine(smollm2_path, tokens=480, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(many, params)
            assert told(outputs) == expected
        assert sum(o.metrics.preemptions for o in outputs if o.metrics) > 0
        llm._core.scheduler.kv.check()
        if host_mib or disk:
            scheduler = llm._core.scheduler
            assert scheduler.loading is not None
            if host_mib == 64:
                assert scheduler.loading.moved > 0
            assert scheduler.loading.moved + scheduler.loading.recomputed > 0
            assert usage(llm).host_bytes <= host_mib << 20


# ---------------------------------------------------------------------- what may befall a folder


SERVER = """
import sys
sys.path[:0] = {paths!r}
from trimaran import LLM, SamplingParams
from trimaran.schedule import loading
from trimaran.schedule.cost_model import StepCostModel
StepCostModel.prefill_seconds = lambda self, start, count: 1.0 * count
loading.MAX_SECONDS = 200.0
params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
options = dict(backend="native", build_cache=False, kv_cache_bytes={kv}, kv_disk_path={disk!r})
with LLM({model!r}, **options) as llm:
    print("ready", flush=True)
    for line in sys.stdin:
        output = llm.generate([eval(line)], params)[0]
        print(repr((output.outputs[0].token_ids, output.cached_tokens)), flush=True)
"""


class Server:
    """An engine in a process of its own, asked line by line."""

    def __init__(self, model: Path, disk: Path) -> None:
        code = SERVER.format(paths=sys.path, model=str(model), disk=str(disk), kv=1024 * BF16_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def send(self, prompt: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{prompt}\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[list[int], int]:
        assert self.process.stdout is not None
        found: tuple[list[int], int] = eval(self.process.stdout.readline())
        return found

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        self.send(prompt)
        return self.answer()

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def blocks(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def test_two_processes_share_one_folder(smollm2_path: Path, tmp_path: Path) -> None:
    with engine(smollm2_path, prefix_cache=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts(6), PARAMS)]
    one, two = Server(smollm2_path, tmp_path), Server(smollm2_path, tmp_path)
    for server in (one, two):  # both compute and write the same at the same time
        server.send(prompts(1)[0])
    assert one.answer()[0] == two.answer()[0] == expected[0]
    for i in range(1, 3):
        assert one.ask(prompts(6)[i])[0] == expected[i]
    until(lambda: len(blocks(tmp_path)) >= 9)
    late = Server(smollm2_path, tmp_path)
    tokens, cached = late.ask(prompts(6)[3])
    assert tokens == expected[3] and cached >= 144
    assert two.ask(prompts(6)[4])[0] == expected[4]
    for server in (one, two, late):
        server.close()


def test_killed_while_writing_and_damaged_afterwards(smollm2_path: Path, tmp_path: Path) -> None:
    with engine(smollm2_path, prefix_cache=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts(3), PARAMS)]
    server = Server(smollm2_path, tmp_path)
    for i in range(2):
        server.send(prompts(3)[i])
    until(lambda: len(blocks(tmp_path)) >= 3)
    server.kill()
    found = blocks(tmp_path)
    assert len(found) >= 3
    again = Server(smollm2_path, tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert again.ask(prompts(3)[2])[0] == expected[2]
    again.close()
    for number, place in enumerate(blocks(tmp_path)):
        data = bytearray(place.read_bytes())
        data[len(data) // 2] ^= 255
        place.write_bytes([data, data[:-1], b"", b"not a block"][number % 4])
    last = Server(smollm2_path, tmp_path)
    for i in range(3):
        assert last.ask(prompts(3)[i])[0] == expected[i]
    last.close()


def test_a_full_folder_costs_no_request(smollm2_path: Path, tmp_path: Path) -> None:
    with engine(smollm2_path, prefix_cache=False) as llm:
        expected = told(llm.generate(prompts(3), PARAMS))
    block = 16 * BF16_BYTES + 48
    with engine(smollm2_path, kv_disk_path=str(tmp_path), kv_disk_bytes=4 * block) as llm:
        for _ in range(3):
            assert told(llm.generate(prompts(3), PARAMS)) == expected
        until(lambda: usage(llm).persisted > 0)
        assert sum(place.stat().st_size for place in blocks(tmp_path)) <= 4 * block


def test_a_folder_that_goes_away_costs_no_request(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with engine(smollm2_path, kv_disk_path=str(folder)) as llm:
        expected = told(llm.generate(prompts(2), PARAMS))
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("no folder any more")
        for _ in range(2):
            assert told(llm.generate(prompts(2), PARAMS)) == expected
        until(lambda: usage(llm).failed > 0)
        assert usage(llm).persisted <= 10


def test_what_can_t_be_used_is_refused_at_the_start(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for options, message in (
        ({"kv_disk_path": str(tmp_path / "file")}, "kv_disk_path .* can't be used"),
        ({"kv_disk_path": str(tmp_path / "file" / "below")}, "kv_disk_path .* can't be used"),
        ({"kv_disk_path": str(tmp_path), "kv_disk_bytes": 1000}, "kv_disk_bytes is 1000"),
        ({"kv_host_bytes": 1000}, "kv_host_bytes is 1000"),
        ({"kv_host_bytes": 1 << 30, "prefix_cache": False}, "prefix_cache is False"),
        ({"kv_disk_path": ""}, "kv_disk_path is ''"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(smollm2_path, **options)


def test_a_broken_key_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    with engine(smollm2_path, kv_disk_path=str(tmp_path)):
        pass
    (key,) = tmp_path.rglob("key")
    os.truncate(key, 5)
    with pytest.raises(ConfigError, match="key has 5 bytes"):
        engine(smollm2_path, kv_disk_path=str(tmp_path))


def test_another_model_s_blocks_are_not_used(smollm2_path: Path, tmp_path: Path) -> None:
    with engine(smollm2_path, kv_disk_path=str(tmp_path)) as llm:
        for _ in range(2):
            llm.generate(prompts(1), PARAMS)
    assert blocks(tmp_path)
    with engine(smollm2_path, kv_disk_path=str(tmp_path), weights="int8") as llm:
        assert llm.generate(prompts(1), PARAMS)[0].cached_tokens == 0


def test_decoding_goes_on_while_another_loads(smollm2_path: Path, tmp_path: Path) -> None:
    """A load that takes a second holds up nobody's tokens."""
    with engine(smollm2_path, kv_disk_path=str(tmp_path)) as llm:
        for _ in range(2):
            expected = told(llm.generate(prompts(1), PARAMS))
    with engine(smollm2_path, kv_disk_path=str(tmp_path)) as llm:
        waits = llm._core.scheduler.loading
        assert waits is not None
        disk = waits.tiers._work.disk
        assert disk is not None
        read = disk.read

        def slowly(digest: bytes) -> Any:
            time.sleep(0.15)
            return read(digest)

        disk.read = slowly  # type: ignore[method-assign]
        decode = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        stamps: list[float] = []
        stream = llm.stream(PREFIX[:5], decode)
        next(stream)
        begin = time.monotonic()
        got: list[Any] = []
        asker = threading.Thread(target=lambda: got.extend(llm.generate(prompts(1), PARAMS)))
        asker.start()
        for _ in stream:
            stamps.append(time.monotonic())
            if got:
                break
        asker.join()
        waited = time.monotonic() - begin
        assert told(got) == expected and got[0].cached_tokens >= 144
        assert waited > 9 * 0.15
        during = [stamp for stamp in stamps if stamp < begin + 9 * 0.15]
        assert len(during) > 20
