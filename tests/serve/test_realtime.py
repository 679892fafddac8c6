"""`/v1/realtime` sessions: OpenAI's own client and plain WebSockets, on the real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from openai import AsyncOpenAI
from support.http_server import HttpServer, open_files, serving

Event = dict[str, Any]
SYSTEM = "You answer questions."
QUESTION = "Name three rivers of Europe and say in one sentence why each of them matters ."
WORDS = QUESTION.split()
SMALL = ("--max-model-len", "512", "--kv-cache-bytes", "64MiB", "--warmup", "0")


class Client:
    """Sends events, and takes what comes back."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> Event:
        return json.loads(await asyncio.wait_for(self.socket.recv(), 60))

    async def until(self, kind: str) -> list[Event]:
        """Events up to the first of this kind."""
        found = [await self.next()]
        while found[-1]["type"] != kind:
            assert found[-1]["type"] != "error", found[-1]
            found.append(await self.next())
        return found

    async def answer(self) -> tuple[str, Event]:
        """The text of a response by its deltas, and its `response.done`."""
        events = await self.until("response.done")
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        return text, events[-1]["response"]

    async def refused(self, kind: str, **fields: Any) -> Event:
        """The error that an event gets."""
        await self.send(kind, event_id="mine", **fields)
        event = await self.next()
        assert event["type"] == "error"
        assert event["error"]["event_id"] == "mine"
        return event["error"]


@contextlib.asynccontextmanager
async def session(server: HttpServer, **options: Any) -> AsyncIterator[Client]:
    url = server.url.replace("http", "ws", 1)
    async with websockets.connect(f"{url}/v1/realtime", **options) as socket:
        client = Client(socket)
        await client.until("session.created")
        yield client


@contextlib.asynccontextmanager
async def greedy(server: HttpServer, tokens: int = 24, **fields: Any) -> AsyncIterator[Client]:
    async with session(server) as client:
        own = {"temperature": 0, "max_output_tokens": tokens, "instructions": SYSTEM, **fields}
        await client.send("session.update", session={"type": "realtime", **own})
        await client.until("session.updated")
        yield client


def chat(server: HttpServer, *said: str, tokens: int = 24) -> tuple[str, dict[str, Any]]:
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "temperature": 0,
        "max_tokens": tokens,
    }
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return found["choices"][0]["message"]["content"], found["usage"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


def wait_until_idle(server: HttpServer) -> None:
    deadline = time.monotonic() + 10
    while True:
        state = httpx.get(f"{server.url}/debug/state").json()
        if not (state["blocks"]["held"] or state["server"]["active_requests"]):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_typed_messages_get_the_answers_of_the_chat_endpoint(server: HttpServer) -> None:
    """Two turns, typed, and the usage of each to the token."""

    async def test() -> None:
        async with greedy(server) as client:
            for word in WORDS:
                await client.send("input_text_buffer.append", text=f"{word} ")
            await client.send("response.create")
            first, done = await client.answer()
            expected, usage = chat(server, QUESTION + " ")
            assert (first, done["status"]) == (expected, "incomplete")
            assert done["status_details"]["reason"] == "max_output_tokens"
            assert done["usage"]["input_tokens"] == usage["prompt_tokens"]
            assert done["usage"]["output_tokens"] == usage["completion_tokens"]
            assert done["output"][0]["content"] == [{"type": "output_text", "text": first}]
            for piece in ("And ", "which is ", "the longest?"):
                await client.send("input_text_buffer.append", text=piece)
            await client.send("input_text_buffer.commit")
            await client.send("response.create")
            second, done = await client.answer()
            expected, usage = chat(server, QUESTION + " ", first, "And which is the longest?")
            assert second == expected
            assert done["usage"]["input_tokens"] == usage["prompt_tokens"]

    run(test)
    wait_until_idle(server)


def test_items_make_a_conversation_and_may_be_changed(server: HttpServer) -> None:
    async def test() -> None:
        async with greedy(server) as client:

            async def item(role: str, text: str, **fields: Any) -> list[Event]:
                kind = "output_text" if role == "assistant" else "input_text"
                content = [{"type": kind, "text": text}]
                await client.send(
                    "conversation.item.create",
                    item={
                        "type": "message",
                        "role": role,
                        "content": content,
                        "id": text[:3].strip(),
                    },
                    **fields,
                )
                return await client.until("conversation.item.done")

            await item("user", "Bye?")
            added = (await item("user", "Hello", previous_item_id="root"))[0]
            assert added["previous_item_id"] is None
            added = (await item("assistant", "Hi there!", previous_item_id="Hel"))[0]
            assert added["previous_item_id"] == "Hel"
            await client.send("conversation.item.delete", item_id="Bye")
            await client.until("conversation.item.deleted")
            await client.send("input_text_buffer.append", text="never")
            await client.send("input_text_buffer.clear")
            await client.until("input_text_buffer.cleared")
            # Changed after it was typed: what was computed ahead is void.
            await client.send("input_text_buffer.append", text="Who are you?")
            await client.send("conversation.item.delete", item_id="Hi")
            await client.until("conversation.item.deleted")
            await item("assistant", "Good day.", previous_item_id="Hel")
            await client.send("response.create", response={"max_output_tokens": 9})
            text, _ = await client.answer()
            assert text == chat(server, "Hello", "Good day.", "Who are you?", tokens=9)[0]

    run(test)
    wait_until_idle(server)


def test_the_answer_begins_sooner_after_the_last_character(server: HttpServer) -> None:
    """A message typed in pieces, against the same one sent whole; by turns, medians of five."""
    text = " ".join(f"Item {i} of the list weighs {i * 7 % 31} grams." for i in range(110))

    async def one(client: Client, salt: str, typed: bool) -> float:
        await client.send("session.update", session={"cache_salt": salt})  # nothing is cached
        await client.until("session.updated")
        pieces = [text[i : i + 64] for i in range(0, len(text), 64)]
        if typed:
            for piece in pieces[:-1]:
                await client.send("input_text_buffer.append", text=piece)
                await asyncio.sleep(0.002)
            for _ in range(500):  # the typist thinks, the engine computes
                answer = await asyncio.to_thread(httpx.get, f"{server.url}/debug/state")
                requests = answer.json()["requests"]
                sequences = requests["running"] + requests["waiting"]
                if sequences and sequences[0]["computed_tokens"] > 800:
                    break
                await asyncio.sleep(0.02)
            begin = time.perf_counter()
            await client.send("input_text_buffer.append", text=pieces[-1])
        else:
            begin = time.perf_counter()
            await client.send("input_text_buffer.append", text=text)
        await client.send("response.create", response={"conversation": "none"})
        events = await client.until("response.output_text.delta")
        seconds = time.perf_counter() - begin
        await client.until("response.done")
        made = [event for event in events if event["type"] == "conversation.item.done"]
        await client.send("conversation.item.delete", item_id=made[0]["item"]["id"])
        await client.until("conversation.item.deleted")
        return seconds

    async def test() -> None:
        async with greedy(server, 4) as client:
            times: dict[bool, list[float]] = {False: [], True: []}
            for i in range(5):
                for typed in (False, True):
                    times[typed].append(await one(client, f"{i} {typed}", typed))
            typed, whole = statistics.median(times[True]), statistics.median(times[False])
            assert typed < whole / 2, times

    run(test)


def test_bad_events_are_refused_by_name_and_the_session_goes_on(server: HttpServer) -> None:
    async def test() -> None:
        async with greedy(server) as client:
            message = {"type": "message", "role": "user"}
            for kind, fields, code, param in [
                ("nonsense", {}, "unknown_event", "type"),
                ("input_audio_buffer.append", {"audio": ""}, "unknown_event", "type"),
                ("input_text_buffer.append", {}, "missing_required_parameter", "text"),
                ("input_text_buffer.append", {"text": 3}, "invalid_value", "text"),
                ("input_text_buffer.append", {"text": "\ud800"}, "invalid_value", "text"),
                ("input_text_buffer.commit", {}, "input_text_buffer_commit_empty", "type"),
                ("response.create", {}, "conversation_empty", "type"),
                ("response.cancel", {}, "response_cancel_not_active", "type"),
                (
                    "session.update",
                    {"session": {"voice": "x"}},
                    "unknown_parameter",
                    "session.voice",
                ),
                ("session.update", {"session": {"top_p": 2}}, "invalid_value", "session.top_p"),
                (
                    "session.update",
                    {"session": {"output_modalities": ["audio"]}},
                    "unsupported_parameter",
                    "session.output_modalities",
                ),
                ("session.update", {"session": {"model": "x"}}, "model_not_found", "model"),
                ("session.update", {"session": {"n": 2}}, "unsupported_parameter", "session.n"),
                (
                    "session.update",
                    {"session": {"logit_bias": {"x": 1}}},
                    "unsupported_parameter",
                    "session.logit_bias",
                ),
                (
                    "response.create",
                    {"response": {"tools": [{"type": "function"}]}},
                    "unsupported_parameter",
                    "response.tools",
                ),
                (
                    "conversation.item.create",
                    {"item": {**message, "content": [{"type": "input_audio", "audio": ""}]}},
                    "invalid_value",
                    "item.content.0.type",
                ),
                (
                    "conversation.item.create",
                    {
                        "item": {**message, "content": [{"type": "input_text", "text": "x"}]},
                        "previous_item_id": "none",
                    },
                    "item_not_found",
                    "previous_item_id",
                ),
                ("conversation.item.delete", {"item_id": "none"}, "item_not_found", "item_id"),
            ]:
                error = await client.refused(kind, **fields)
                assert (error["code"], error["param"]) == (code, param), (kind, error)
                assert error["message"]
            for text in ("{", "[]", '{"type": NaN}', "[" * 100_000, '{"a": ' + "9" * 10_000 + "}"):
                await client.socket.send(text)
                assert (await client.next())["error"]["code"] == "invalid_json"
            await client.socket.send(b"\x00")
            assert (await client.next())["error"]["code"] == "invalid_json"
            await client.send("input_text_buffer.append", text="Hello")
            await client.send("response.create")
            assert (await client.answer())[0] == chat(server, "Hello")[0]

    run(test)
    wait_until_idle(server)


def test_a_response_can_be_cancelled_and_only_one_runs(server: HttpServer) -> None:
    async def test() -> None:
        async with greedy(server, 400, ignore_eos=True) as client:
            await client.send("input_text_buffer.append", text="Tell me a long story.")
            await client.send("response.create")
            await client.until("response.output_text.delta")
            await client.send("response.create", event_id="second")
            while (event := await client.next())["type"] != "error":
                pass
            assert event["error"]["code"] == "conversation_already_has_active_response"
            await client.send("input_text_buffer.append", text="Never mind.")
            await client.send("response.cancel")
            _, done = await client.answer()
            assert done["status"] == "cancelled"
            assert done["status_details"]["reason"] == "client_cancelled"
            assert 0 < done["usage"]["output_tokens"] < 400
            assert done["output"][0]["status"] == "incomplete"
            await client.send("response.create", response={"max_output_tokens": 4})
            assert (await client.answer())[1]["usage"]["output_tokens"] == 4

    run(test)
    wait_until_idle(server)


def test_a_client_that_leaves_frees_its_blocks(server: HttpServer) -> None:
    """While it types, and while it is answered; the requests are counted."""
    counted = server.metric("vllm:request_success_total")

    async def test() -> None:
        async with greedy(server, 800, ignore_eos=True) as client:
            await client.send("input_text_buffer.append", text="word " * 400)
            for _ in range(500):
                if (await state(server))["blocks"]["held"]:
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail("nothing was computed of what was typed")
            assert (await state(server))["server"]["active_requests"] == 1
        async with greedy(server, 800, ignore_eos=True) as client:
            await client.send("input_text_buffer.append", text="Go on.")
            await client.send("response.create")
            await client.until("response.output_text.delta")
            client.socket.transport.abort()

    run(test)
    wait_until_idle(server)
    assert server.metric("vllm:request_success_total") == counted + 1


def test_openais_own_client(server: HttpServer) -> None:
    async def test() -> None:
        client = AsyncOpenAI(
            api_key="none",
            base_url=f"{server.url}/v1",
            websocket_base_url=server.url.replace("http", "ws", 1) + "/v1",
        )
        async with client.realtime.connect(model="smollm2") as connection:
            await connection.session.update(
                session={
                    "type": "realtime",
                    "output_modalities": ["text"],
                    "instructions": SYSTEM,
                    "max_output_tokens": 24,
                }
            )
            await connection.send({"type": "session.update", "session": {"temperature": 0}})  # type: ignore[typeddict-item]
            await connection.conversation.item.create(
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": QUESTION}],
                }
            )
            await connection.response.create()
            text = ""
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.done":
                    expected, usage = chat(server, QUESTION)
                    assert event.response.usage is not None
                    assert event.response.usage.input_tokens == usage["prompt_tokens"]
                    break
            assert text == expected

    run(test)


async def state(server: HttpServer) -> dict[str, Any]:
    answer = await asyncio.to_thread(httpx.get, f"{server.url}/debug/state")
    return answer.json()


# ---------------------------------------------------------------------- on a server of its own


@pytest.fixture(scope="module")
def limited(smollm2_path: Path) -> Iterator[HttpServer]:
    limits = ("--session-timeout", "3", "--max-body-bytes", "20k", "--max-queue", "2")
    with serving(*SMALL, "--api-key", "right", *limits) as server:
        yield server


KEY = {"additional_headers": {"Authorization": "Bearer right"}}


def test_keys_and_foreign_pages(limited: HttpServer) -> None:
    async def test() -> None:
        for options in (
            KEY,
            {"subprotocols": ["realtime", "openai-insecure-api-key.right"]},
            {**KEY, "origin": limited.url},
        ):
            async with session(limited, **options):
                pass
        for options in (
            {},
            {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]},
            {**KEY, "origin": "https://evil.example"},
        ):
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with session(limited, **options):
                    pass
            assert refused.value.response.status_code == 403

    run(test)
    assert limited.log.count("WEBSOCKET /v1/realtime ended") == 3


def test_a_session_is_limited_in_time_size_and_number(limited: HttpServer) -> None:
    async def test() -> None:
        async with session(limited, **KEY) as client:
            assert (await client.next())["error"]["code"] == "session_expired"
            with pytest.raises(websockets.ConnectionClosedOK):
                await client.next()
        async with session(limited, **KEY) as client:
            for _ in range(3):
                await client.send("input_text_buffer.append", text="a" * 6000)
            error = await client.refused("input_text_buffer.append", text="a" * 6000)
            assert (error["code"], error["param"]) == ("conversation_too_long", "text")
            await client.send("input_text_buffer.append", text="a" * 30_000)
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await client.next()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        url = limited.url.replace("http", "ws", 1)
        async with websockets.connect(f"{url}/v1/realtime?model=other", **KEY) as socket:  # type: ignore[arg-type]
            assert (await Client(socket).next())["error"]["code"] == "model_not_found"

    run(test)


def test_a_full_server_refuses_a_response_and_not_the_session(limited: HttpServer) -> None:
    async def ask(client: Client) -> None:
        await client.send("input_text_buffer.append", text="abc")
        await client.send(
            "response.create", response={"max_output_tokens": 300, "ignore_eos": True}
        )

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(session(limited, **KEY)) for _ in range(3)]
            for client in clients[:2]:
                await ask(client)
                await client.until("response.output_text.delta")
            await ask(clients[2])
            while (event := await clients[2].next())["type"] != "error":
                pass
            assert event["error"]["type"] == "rate_limit_error"
            for client in clients[:2]:
                await client.send("response.cancel")
                await client.until("response.done")
            await clients[2].send("response.create", response={"max_output_tokens": 2})
            await clients[2].until("response.done")

    run(test)


def test_a_drained_server_ends_the_answer_and_then_the_session(smollm2_path: Path) -> None:
    with serving(*SMALL) as server:

        async def test() -> None:
            async with session(server) as idle, session(server) as client:
                await client.send("input_text_buffer.append", text="abc")
                own = {"max_output_tokens": 200, "ignore_eos": True}
                await client.send("response.create", response=own)
                await client.until("response.output_text.delta")
                stopping = asyncio.ensure_future(asyncio.to_thread(server.stop))
                _, done = await client.answer()
                assert done["usage"]["output_tokens"] == 200
                for each in (client, idle):
                    with pytest.raises(websockets.ConnectionClosed) as closed:
                        await each.next()
                    assert closed.value.rcvd is not None
                    assert closed.value.rcvd.code == 1001
                assert await stopping == 0

        run(test)


def test_a_client_that_takes_nothing_is_let_go(smollm2_path: Path) -> None:
    with serving(*SMALL, "--write-timeout", "1") as server:
        files = open_files(server)

        async def test() -> None:
            async with session(server, max_queue=1, close_timeout=1, compression=None) as client:
                content = [{"type": "input_text", "text": "x" * 900_000}]
                item = {"type": "message", "role": "user", "id": "large", "content": content}
                await client.send("conversation.item.create", item=item)
                await client.until("conversation.item.done")
                await client.send("input_text_buffer.append", text="Hello")
                for _ in range(40):
                    await client.send("conversation.item.retrieve", item_id="large")
                begin = time.monotonic()
                while open_files(server) > files:  # the server ends it, whatever we do
                    await asyncio.sleep(0.1)
                assert time.monotonic() - begin < 30  # later its pings would have ended it

        run(test)
        wait_until_idle(server)
