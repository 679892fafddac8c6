"""A `/v1/realtime` session: a conversation in text, by events.

The events are those of OpenAI's realtime API, and `input_text_buffer.append` hands over a
message while it is typed: what nothing can change any more of it is computed at once (see
`engine/open_request.py`), so that the answer begins soon after its last character.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from pydantic import ValidationError

from trimaran.core.errors import RequestError, TrimaranError
from trimaran.core.request import FinishReason
from trimaran.serve.answers import Usage, merged
from trimaran.serve.conversation import Conversation, ConversationItem, new_id
from trimaran.serve.errors import ApiError
from trimaran.serve.invalid import as_invalid
from trimaran.serve.schema.realtime import (
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionFields,
    SessionUpdate,
    TextAppend,
    TextEnd,
)
from trimaran.serve.service import Job, Phase, Service, deltas
from trimaran.serve.sse import told
from trimaran.serve.typed_prompt import Terms, TypedPrompt

Event = dict[str, Any]
Send = Callable[[Event], Awaitable[None]]
Handler = Callable[[Any], Awaitable[None]]


class Response:
    """An answer that is being made."""

    def __init__(self, job: Job, fields: ResponseFields, limit: int | None) -> None:
        self.id = new_id("resp")
        self.item = ConversationItem("assistant", "", status="in_progress")
        self.job = job
        self.usage = Usage(0)
        self.task: asyncio.Task[None] | None = None
        self.status = "in_progress"
        self.details: Event | None = None
        self._fields = fields
        self._limit = limit

    @property
    def kept(self) -> bool:
        """Whether it becomes part of the conversation."""
        return self._fields.conversation == "auto"

    def shown(self, conversation_id: str) -> Event:
        """As OpenAI's API shows it."""
        ended = self.status != "in_progress"
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": self.status,
            "status_details": self.details,
            "output": [self.item.shown()] if ended and self.item.text else [],
            "conversation_id": conversation_id if self.kept else None,
            "output_modalities": ["text"],
            "max_output_tokens": self._limit or "inf",
            "metadata": self._fields.metadata,
            "usage": self._usage() if ended else None,
        }

    def ended(self, reason: FinishReason | None) -> None:
        """Sets the status from why the engine ended it."""
        if reason is FinishReason.ABORT:
            self.status = "cancelled"
            self.details = {"type": "cancelled", "reason": "client_cancelled"}
        elif reason is FinishReason.LENGTH:
            self.status = "incomplete"
            self.details = {"type": "incomplete", "reason": "max_output_tokens"}
        else:
            self.status = "completed"
        self.item.status = "completed" if self.status == "completed" else "incomplete"

    def failed(self, error: ApiError) -> None:
        """Sets the status from an error."""
        self.status, self.item.status = "failed", "incomplete"
        what = {"type": error.kind, "code": error.code, "message": error.message}
        self.details = {"type": "failed", "error": what}

    def _usage(self) -> Event:
        prompt, output = self.job.prompt_tokens, self.usage.completion
        return {
            "total_tokens": prompt + output,
            "input_tokens": prompt,
            "output_tokens": output,
            "input_token_details": {
                "cached_tokens": self.usage.cached,
                "text_tokens": prompt,
                "audio_tokens": 0,
            },
            "output_token_details": {"text_tokens": output, "audio_tokens": 0},
        }


class RealtimeSession:
    """One client's session. `handle` takes its events one after the other; the answer is sent
    by a task beside it."""

    def __init__(self, service: Service, model: str, send: Send) -> None:
        """
        Args:
            send: sends one event; its waiting is the back-pressure of a slow client.
        """
        self.id = new_id("sess")
        self._service = service
        self._config = SessionFields.model_validate({"model": model})
        self._emit = send
        self._conversation = Conversation(service.config.max_body_bytes)
        self._typed = ""
        self._prompt = TypedPrompt(service, self.id)
        self._running: Response | None = None
        self._handlers: dict[str, tuple[type[ClientEvent], Handler]] = {
            "session.update": (SessionUpdate, self._update),
            "conversation.item.create": (ItemCreate, self._create_item),
            "conversation.item.retrieve": (ItemDelete, self._retrieve_item),
            "conversation.item.delete": (ItemDelete, self._delete_item),
            "input_text_buffer.append": (TextAppend, self._append),
            "input_text_buffer.commit": (TextEnd, self._commit),
            "input_text_buffer.clear": (TextEnd, self._clear),
            "response.create": (ResponseCreate, self._respond),
            "response.cancel": (ResponseCancel, self._cancel),
        }

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self._running is not None

    async def begin(self) -> None:
        """Tells the client of the session."""
        await self._send("session.created", session=self._shown())

    async def handle(self, text: str) -> None:
        """Takes one event; what is wrong with it is told the client by an `error` event."""
        event_id = None
        try:
            found = _json(text)
            given = found.get("event_id")
            event_id = given if isinstance(given, str) else None
            kind = found.get("type")
            if not isinstance(kind, str) or kind not in self._handlers:
                known = ", ".join(self._handlers)
                shown = kind[:64] if isinstance(kind, str) else kind
                raise ApiError(
                    400,
                    f"type is {shown!r}; give one of {known}"
                    if "type" in found
                    else f"'type' is missing; give one of {known}",
                    param="type",
                    code="unknown_event" if "type" in found else "missing_required_parameter",
                )
            schema, handler = self._handlers[kind]
            try:
                event = schema.model_validate(found)
            except ValidationError as error:
                raise as_invalid(dict(error.errors()[0]), found) from None
            await handler(event)
        except (ApiError, TrimaranError) as error:
            await self.error(told(error), event_id)

    async def error(self, error: ApiError, event_id: str | None = None) -> None:
        """Tells the client of an error; the session goes on."""
        await self._send("error", error={**error.body()["error"], "event_id": event_id})

    async def close(self) -> None:
        """Ends what runs and frees what it holds."""
        self._prompt.close()
        if self._running is not None and self._running.task is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    # ------------------------------------------------------------------ events

    async def _update(self, event: SessionUpdate) -> None:
        event.session.refuse_unsupported("session")
        if event.session.model is not None:
            self._service.check_model(event.session.model)
        changed = event.session.model_dump(exclude_unset=True)
        if changed.keys() & {"max_output_tokens", "max_response_output_tokens"}:
            changed = {"max_output_tokens": None, "max_response_output_tokens": None} | changed
        config = self._config.model_copy(update=changed)
        _checked(config, "session")
        self._config = config
        await self._send("session.updated", session=self._shown())
        await self._ahead()

    async def _create_item(self, event: ItemCreate) -> None:
        given = event.item
        self._check_text(given.text, "item.content")
        item = ConversationItem(given.role, given.text)
        item.id = given.id or item.id
        before = self._conversation.add(item, event.previous_item_id)
        await self._told_item(item, before)

    async def _retrieve_item(self, event: ItemDelete) -> None:
        item = self._conversation.get(event.item_id)
        await self._send("conversation.item.retrieved", item=item.shown())

    async def _delete_item(self, event: ItemDelete) -> None:
        if self._running is not None and event.item_id == self._running.item.id:
            raise ApiError(
                400,
                f"item '{event.item_id}' is still being made; send response.cancel first",
                param="item_id",
                code="item_in_progress",
            )
        self._conversation.delete(event.item_id)
        await self._send("conversation.item.deleted", item_id=event.item_id)

    async def _append(self, event: TextAppend) -> None:
        self._conversation.check_room(len(self._typed) + len(event.text), "text")
        self._check_text(event.text, "text")
        self._typed += event.text
        await self._ahead()

    async def _commit(self, event: ClientEvent) -> None:
        if not self._typed:
            raise ApiError(
                400,
                "the text buffer is empty; send input_text_buffer.append first",
                param="type",
                code="input_text_buffer_commit_empty",
            )
        item = ConversationItem("user", self._typed)
        before = self._conversation.add(item)
        self._typed = ""
        await self._send("input_text_buffer.committed", item_id=item.id, previous_item_id=before)
        await self._told_item(item, before)

    async def _clear(self, event: ClientEvent) -> None:
        self._typed = ""
        self._prompt.close()
        await self._send("input_text_buffer.cleared")

    async def _respond(self, event: ResponseCreate) -> None:
        if self._running is not None:
            raise ApiError(
                400,
                f"response '{self._running.id}' is still being made; wait for response.done or"
                " send response.cancel",
                param="type",
                code="conversation_already_has_active_response",
            )
        fields = event.response or ResponseFields.model_validate({})
        fields.refuse_unsupported("response")
        config = _merged(self._config, fields)
        terms = _checked(config, "response")
        if self._typed:
            await self._commit(event)
        messages = self._conversation.messages(config.instructions)
        if not len(self._conversation):
            raise ApiError(
                400,
                "the conversation is empty; send conversation.item.create or"
                " input_text_buffer.append first",
                param="type",
                code="conversation_empty",
            )
        with ExitStack() as stack:
            taken = await self._prompt.take(messages, terms)
            if taken is None:
                job = await self._whole(stack, messages, terms)
            else:
                job = taken[0]
                stack.push(taken[1])
            response = Response(job, fields, config.limit)
            if response.kept:
                self._conversation.add(response.item)
            self._running = response
            response.task = asyncio.ensure_future(self._answer(response, stack.pop_all()))

    async def _cancel(self, event: ResponseCancel) -> None:
        running = self._running
        if running is None or event.response_id not in (None, running.id):
            raise ApiError(
                400,
                "no response is being made"
                + (f" with id '{event.response_id}'" if running else ""),
                param="response_id" if running else "type",
                code="response_cancel_not_active",
            )
        for stream in running.job.streams:  # it ends with the reason ABORT, which is told
            self._service.engine.abort(stream.request.id)

    # ------------------------------------------------------------------ answers

    async def _whole(self, stack: ExitStack, messages: list[dict[str, str]], terms: Terms) -> Job:
        self._service.admit(1, 1)
        prompt = await self._service.encode_chat(messages)
        return stack.enter_context(
            self._service.start([prompt], terms.params, self.id, **terms.options())
        )

    async def _answer(self, response: Response, stack: ExitStack) -> None:
        """Sends an answer as it comes, and what it came to."""
        item, where = response.item, {"response_id": response.id, "output_index": 0}
        part = {**where, "item_id": response.item.id, "content_index": 0}
        with stack:
            try:
                shown = response.shown(self._conversation.id)
                await self._send("response.created", response=shown)
                await self._send("response.output_item.added", item=item.shown(), **where)
                if response.kept:
                    await self._send("conversation.item.added", item=item.shown())
                empty = {"type": "output_text", "text": ""}
                await self._send("response.content_part.added", part=empty, **part)
                async for _, found in deltas(response.job):
                    for delta in merged(found):
                        response.usage.add(delta)
                        if delta.text:
                            item.text += delta.text
                            await self._send("response.output_text.delta", delta=delta.text, **part)
                response.ended(response.job.streams[0].finish_reason)
            except (ApiError, TrimaranError) as error:
                response.failed(told(error))
        whole = {"type": "output_text", "text": item.text}
        await self._send("response.output_text.done", text=item.text, **part)
        await self._send("response.content_part.done", part=whole, **part)
        if response.kept:
            await self._send("conversation.item.done", item=item.shown())
        await self._send("response.output_item.done", item=item.shown(), **where)
        if response.kept and not item.text:  # nothing of it is worth a place in a prompt
            self._conversation.delete(item.id)
            await self._send("conversation.item.deleted", item_id=item.id)
        self._running = None  # before the client knows, who may ask for the next one at once
        await self._send("response.done", response=response.shown(self._conversation.id))
        await self._ahead()

    # ------------------------------------------------------------------ parts

    async def _ahead(self) -> None:
        """Has the engine compute what is typed, unless an answer must come before it."""
        if not self._typed or self._running is not None or self._service.phase is not Phase.READY:
            return
        before = self._conversation.messages(self._config.instructions)
        await self._prompt.typed(before, self._typed, _checked(self._config, "session"))

    def _check_text(self, text: str, param: str) -> None:
        try:
            self._service.engine.core.tokenizer.check_text(text)
        except RequestError as error:
            raise ApiError(400, str(error), param=param, code="invalid_value") from None

    async def _told_item(self, item: ConversationItem, before: str | None) -> None:
        for kind in ("added", "done"):
            await self._send(
                f"conversation.item.{kind}", item=item.shown(), previous_item_id=before
            )

    def _shown(self) -> Event:
        config = self._config.model_dump(exclude_none=True)
        limit = {"max_output_tokens": self._config.limit or "inf"}
        config.pop("max_response_output_tokens", None)
        own = {"id": self.id, "object": "realtime.session", "output_modalities": ["text"]}
        return {"instructions": "", **config, **own, **limit}

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._emit({"type": kind, "event_id": new_id("event"), **fields})


def _merged(config: SessionFields, fields: ResponseFields) -> SessionFields:
    changed = fields.model_dump(exclude_unset=True, exclude={"conversation", "metadata"})
    if changed.keys() & {"max_output_tokens", "max_response_output_tokens"}:
        changed = {"max_output_tokens": None, "max_response_output_tokens": None} | changed
    return config.model_copy(update=changed)


def _checked(config: SessionFields, where: str) -> Terms:
    """What requests of this configuration are made of; an error names the field in `where`."""
    try:
        return Terms(config.params(), config.priority, config.cache_salt)
    except (ApiError, TrimaranError) as error:
        found = told(error)
        if found.param is not None:
            found.param = f"{where}.{found.param}"
        raise found from None


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the event isn't valid JSON", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the event must be a JSON object", code="invalid_json")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} isn't JSON")
