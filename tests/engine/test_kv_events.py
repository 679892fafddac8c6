"""A subscriber that knows only vLLM's published schema rebuilds what is stored."""

from __future__ import annotations

import builtins
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.processes import in_fork

from trimaran import LLM, SamplingParams
from trimaran.core.errors import ConfigError
from trimaran.engine.kv_events import EventAddress, short_hash

KV_BYTES = 30 * 2 * 3 * 64 * 2


# The schema as vLLM publishes it for subscribers: vllm/distributed/kv_events.py.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class OldBatch(EventBatch):
    """Of the first versions, which know neither adapters' names nor ranks."""

    class BlockStored(KVCacheEvent, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class BlockRemoved(KVCacheEvent, tag="BlockRemoved"):
        block_hashes: list[int]

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """What it believes to be stored: by hash, the tokens up to the end of the block."""

    def __init__(self, publish: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(publish)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.topic = topic.encode()
        self.stored: dict[int | bytes, list[int]] = {}
        self.next = 0
        self.batches = 0

    def take(self, sequence: int, payload: bytes) -> None:
        assert sequence == self.next
        self.next += 1
        self.batches += 1
        msgspec.msgpack.decode(payload, type=OldBatch)
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert abs(batch.ts - time.time()) < 300 and batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.block_size == len(event.token_ids) == 16 and event.medium == "GPU"
                parent = event.parent_block_hash
                before = [] if parent is None else self.stored[parent]
                (name,) = event.block_hashes
                assert name not in self.stored
                self.stored[name] = before + event.token_ids
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.stored[name]
            else:
                self.stored.clear()

    def listen(self, seconds: float) -> None:
        while self.socket.poll(seconds * 1000):
            topic, sequence, payload = self.socket.recv_multipart()
            assert topic == self.topic and len(sequence) == 8
            self.take(int.from_bytes(sequence, "big"), payload)

    def close(self) -> None:
        self.context.destroy(linger=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def publishing(path: Path, tokens: int = 640, more: str = "", **options: Any) -> Iterator[Any]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with LLM(
        path,
        backend="native",
        kv_cache_bytes=tokens * KV_BYTES,
        kv_events=endpoint + more,
        **options,
    ) as llm:
        yield llm, endpoint


def stored(llm: LLM) -> dict[int, list[int]]:
    """What the prefix index has, by its own account."""
    kv = llm._core.scheduler.kv
    assert kv.content is not None
    found = {}
    for block in range(kv.num_blocks):
        if block in kv.index:
            entry = kv.content.at(block)
            assert entry is not None
            found[short_hash(entry.digest)] = kv.index.prefix(block)[1]
    return found


def test_a_subscriber_rebuilds_the_set_of_stored_blocks(smollm2_path: Path) -> None:
    rng = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    stem = [rng.randrange(300, 40000) for _ in range(100)]
    with publishing(smollm2_path, more=",topic=kv@here") as (llm, endpoint):
        subscriber = Subscriber(endpoint, "kv@here")
        time.sleep(0.5)  # until it is known: PUB sends nothing to whom it doesn't know
        for turn in range(4):
            prompts = [
                [*stem[: rng.randrange(100)], *rng.choices(range(300, 40000), k=50)]
                for _ in range(6)
            ]
            llm.generate(prompts, params)
            subscriber.listen(0.3)
            assert subscriber.stored == stored(llm), turn
            if turn == 2:
                llm._thread.call(lambda core: core.scheduler.kv.reset_prefix_cache())
                subscriber.listen(0.3)
                assert subscriber.stored == {} == stored(llm)
        assert llm._core.scheduler.kv.usage().total == 40  # so most were removed again
        assert len(subscriber.stored) <= 40 and subscriber.batches > 4
        subscriber.close()


def test_who_comes_late_asks_for_what_was_before(smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    replay = f"tcp://127.0.0.1:{free_port()}"
    with publishing(smollm2_path, more=f",replay={replay}") as (llm, endpoint):
        for seed in range(3):
            llm.generate([random.Random(seed).choices(range(300, 40000), k=60)], params)
            time.sleep(0.05)
        subscriber = Subscriber(endpoint)
        asker = subscriber.context.socket(zmq.DEALER)
        asker.connect(replay)
        for unsound in ([b"x"], [b"", b"1"], [b"", b"1" * 9], [b"", b"", b"", b""]):
            asker.send_multipart(unsound)
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert asker.poll(10_000), "no answer"
            empty, sequence, payload = asker.recv_multipart()
            assert empty == b""
            if not payload:
                break
            subscriber.take(int.from_bytes(sequence, "big"), payload)
        assert sequence == (-1).to_bytes(8, "big", signed=True)
        assert subscriber.stored == stored(llm) and subscriber.batches >= 3
        asker.send_multipart([b"", (subscriber.next - 1).to_bytes(8, "big")])
        answers = []
        while asker.poll(1000):
            answers.append(asker.recv_multipart()[1])
        assert answers == [(subscriber.next - 1).to_bytes(8, "big"), b"\xff" * 8]
        subscriber.close()


def test_what_is_loaded_from_the_disk_is_stored_again(smollm2_path: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompt = [list(range(1000, 1100))]
    names = []
    for _ in range(2):
        with publishing(smollm2_path, kv_disk_path=str(tmp_path)) as (llm, endpoint):
            subscriber = Subscriber(endpoint)
            time.sleep(0.5)
            llm.generate(prompt, params)
            llm.generate(prompt, params)
            subscriber.listen(0.3)
            assert subscriber.stored == stored(llm)
            names.append(set(subscriber.stored))
            subscriber.close()
    assert names[0] == names[1] and len(names[0]) == 6


def test_addresses() -> None:
    assert EventAddress.parse("tcp://*:5557") == EventAddress("tcp://*:5557", None, "")
    assert EventAddress.parse("ipc:///a,topic=kv@x@y,replay=tcp://*:1") == EventAddress(
        "ipc:///a", "tcp://*:1", "kv@x@y"
    )
    for text in ("5557", "tcp://*:1,replay=2", "tcp://*:1,topics=a", "tcp://*:1,topic", ",",
                 "tcp://*:1,topic=a,topic=b"):  # fmt: skip
        with pytest.raises(ConfigError, match="kv_events has"):
            EventAddress.parse(text)


def test_what_can_t_be_had_is_refused_at_the_start(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="can't be bound: Address already in use"):
            LLM(smollm2_path, kv_events=endpoint)
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "zmq":
            raise ModuleNotFoundError("No module named 'zmq'", name="zmq")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"needs the package zmq.*trimaran\[events\]"):
        LLM(smollm2_path, kv_events="tcp://127.0.0.1:1")


def test_an_engine_in_a_fork_publishes_its_own(smollm2_path: Path) -> None:
    def child() -> str:
        with publishing(smollm2_path) as (llm, endpoint):
            subscriber = Subscriber(endpoint)
            time.sleep(0.5)
            llm.generate([list(range(1000, 1050))], SamplingParams(max_tokens=2))
            subscriber.listen(0.3)
            return str(subscriber.stored == stored(llm) and len(subscriber.stored) == 3)

    assert in_fork(child) == "True"
