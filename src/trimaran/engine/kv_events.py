"""Publishes what the prefix index stores and gives up, in vLLM's wire format over ZMQ.

    PUB      [topic, sequence u64 big-endian, payload]
    ROUTER   a subscriber that missed some asks [empty, first sequence u64 big-endian], and gets
             [empty, sequence, payload] for each that is still kept, then [empty, -1 i64, empty]

    payload  msgpack [ts, [event, …], data parallel rank]
    event    ["BlockStored", [hash], hash before or nil, [token id, …], block size, nil, "GPU",
              nil]
             ["BlockRemoved", [hash, …], "GPU"]
             ["AllBlocksCleared"]

These are the arrays that msgspec makes of the classes in vllm/distributed/kv_events.py; the
nils are those of adapters, by number and by name. A hash is the last 64 bits of the digest
(`cache/content.py`), as vLLM has it by default. "GPU" is vLLM's word for the memory that the
model computes with; here it may be a CPU's.

The engine's thread puts an event into a queue, which takes well under a microsecond. A thread
of its own makes batches of what came within 5 ms. A subscriber that is too slow loses batches,
sees it by the sequence numbers, and asks for them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.cache.content import StoredBlock
from trimaran.core.errors import ConfigError

KEPT_BATCHES = 10_000
MEDIUM = "GPU"

_QUIET_SECONDS = 0.1
_GATHER_SECONDS = 0.005
_MAX_EVENTS = 4096  # of a batch
_HIGH_WATER_MARK = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where events go, from `EngineConfig.kv_events`."""

    publish: str
    replay: str | None = None
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> EventAddress:
        """From "ENDPOINT[,replay=ENDPOINT][,topic=NAME]".

        Raises:
            ConfigError: it is none.
        """
        publish, *rest = text.split(",")
        given: dict[str, str] = {}
        for part in rest:
            name, equals, value = part.partition("=")
            if name not in ("replay", "topic") or not equals or name in given:
                raise ConfigError(
                    f"kv_events has '{part}'; give ENDPOINT[,replay=ENDPOINT][,topic=NAME]"
                )
            given[name] = value
        for endpoint in (publish, given.get("replay", publish)):
            if "://" not in endpoint:
                raise ConfigError(
                    f"kv_events has '{endpoint}', which is no ZMQ endpoint; give one as in"
                    " tcp://*:5557"
                )
        return cls(publish, given.get("replay"), given.get("topic", ""))


def open_publisher(text: str, block_size: int) -> EventPublisher:
    """A publisher that has bound its endpoints.

    Raises:
        ConfigError: the packages aren't installed, or an endpoint can't be bound.
    """
    address = EventAddress.parse(text)
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise ConfigError(
            f"kv_events needs the package {error.name}, which isn't installed; run"
            " pip install 'trimaran[events]', or leave kv_events out"
        ) from None
    context = zmq.Context()
    try:
        publish = context.socket(zmq.PUB)
        publish.set_hwm(_HIGH_WATER_MARK)
        publish.bind(address.publish)
        replay = None
        if address.replay is not None:
            replay = context.socket(zmq.ROUTER)
            replay.bind(address.replay)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(f"kv_events '{text}' can't be bound: {error}; give others") from None
    encode = msgspec.msgpack.Encoder().encode
    return EventPublisher(context, publish, replay, encode, address.topic, block_size)


class EventPublisher:
    """Observes stored blocks (`BlockObserver`) and publishes until it is closed."""

    def __init__(
        self,
        context: Any,
        publish: Any,
        replay: Any,
        encode: Any,
        topic: str,
        block_size: int,
    ) -> None:
        """
        Args:
            context, publish, replay: a ZMQ context and its sockets, which are closed with this.
            encode: from lists to msgpack.
        """
        self._context = context
        self._publish = publish
        self._replay = replay
        self._encode = encode
        self._topic = topic.encode()
        self._block_size = block_size
        self._events: queue.SimpleQueue[tuple[str, StoredBlock | None] | None]
        self._events = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="trimaran-kv-events", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ on the engine's thread

    def stored(self, stored: StoredBlock) -> None:
        self._events.put(("BlockStored", stored))

    def used(self, found: Sequence[StoredBlock]) -> None:
        """Says nothing about what is stored."""

    def removed(self, stored: StoredBlock) -> None:
        self._events.put(("BlockRemoved", stored))

    def cleared(self) -> None:
        self._events.put(("AllBlocksCleared", None))

    def close(self) -> None:
        """Publishes what is queued, and closes the sockets; may be called twice."""
        self._events.put(None)
        self._thread.join()

    # ------------------------------------------------------------------ on its own

    def _run(self) -> None:
        running = True
        while running:
            if self._replay is not None:
                while self._replay.poll(0):
                    self._answer()
            batch, running = self._gather()
            if batch:
                self._send(batch)
        self._context.destroy(linger=200)

    def _gather(self) -> tuple[list[list[Any]], bool]:
        """(events that came together, whether there will be more)."""
        batch: list[list[Any]] = []
        wait = _QUIET_SECONDS
        try:
            while len(batch) < _MAX_EVENTS:
                event = self._events.get(timeout=wait)
                if event is None:
                    return batch, False
                if not batch:  # others will come at once: of a prompt, or of a step
                    time.sleep(_GATHER_SECONDS)
                self._append(batch, *event)
                wait = 0
        except queue.Empty:
            pass
        return batch, True

    def _append(self, batch: list[list[Any]], kind: str, stored: StoredBlock | None) -> None:
        if stored is None:
            batch.append([kind])
        elif kind == "BlockStored":
            before = None if stored.before is None else short_hash(stored.before)
            own = [short_hash(stored.digest)]
            batch.append([kind, own, before, stored.tokens, self._block_size, None, MEDIUM, None])
        elif batch and batch[-1][0] == kind:
            batch[-1][1].append(short_hash(stored.digest))
        else:
            batch.append([kind, [short_hash(stored.digest)], MEDIUM])

    def _send(self, batch: list[list[Any]]) -> None:
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        payload = self._encode([time.time(), batch, 0])
        self._kept.append((number, payload))
        self._publish.send_multipart((self._topic, number, payload))

    def _answer(self) -> None:
        """A subscriber's question for what it missed; an unsound one is not answered."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        asker, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((asker, b"", number, payload))
        self._replay.send_multipart((asker, b"", _END, b""))


def short_hash(digest: bytes) -> int:
    """The last 64 bits of a digest: a block's name in events."""
    return int.from_bytes(digest[-8:], "big")
