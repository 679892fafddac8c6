"""What all endpoints share: the engine, the model's names, admission, and the server's state."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trimaran.core.errors import TemplateError
from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import STANDARD, SloClass
from trimaran.engine.async_engine import AsyncEngine, RequestStream
from trimaran.engine.chat_frame import ChatFrame
from trimaran.engine.collector import OutputCollector
from trimaran.engine.encoder_engine import EncoderEngine, EncoderStream
from trimaran.engine.open_request import OpenRequest
from trimaran.engine.prompt import Prompt, prompt_ids
from trimaran.models.chat_template import ChatTemplate
from trimaran.serve.config import ServeConfig
from trimaran.serve.errors import ApiError, busy, timed_out, unavailable
from trimaran.serve.metrics import ServerMetrics
from trimaran.serve.record import current

LONG_TEXT = 50_000
"""Characters above which a text is encoded on another thread, so that the loop goes on."""
LARGE_THREADS = 2
"""Such texts that are encoded at once."""

T = TypeVar("T")


class Phase(enum.StrEnum):
    """The life of a server."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class LoadedService:
    """The model behind the server, once it is loaded: one that generates, or an encoder."""

    generator: AsyncEngine | None
    template: ChatTemplate | None
    path: Path
    encoder: EncoderEngine | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine(self) -> AsyncEngine:
        """What generates.

        Raises:
            ApiError: 400, nothing does.
        """
        if self.generator is None:
            raise ApiError(
                400,
                f"the model '{self.name}' is an encoder: it makes embeddings and generates no"
                " text; use /v1/embeddings",
                param="model",
                code="model_not_generative",
            )
        return self.generator

    @property
    def either(self) -> AsyncEngine | EncoderEngine:
        """What there is."""
        found = self.generator or self.encoder
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """The model's own name: of its file or folder."""
        return self.path.stem if self.path.is_file() else self.path.name


@dataclass(slots=True)
class Job:
    """The engine's requests that answer one HTTP request: one a prompt, each with `n` choices.

    Attributes:
        prompts: token ids.
        texts: the prompts as text, where they came as text.
        begin: when it was complete, on the loop's clock.
        deadline: likewise.
        asked: it is complete.
    """

    params: SamplingParams
    prompts: list[list[int]]
    texts: list[str | None]
    streams: list[RequestStream | OpenRequest]
    begin: float
    deadline: float
    metrics: ServerMetrics
    asked: bool = True

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def close(self) -> None:
        """Aborts what hasn't ended."""
        for stream in self.streams:
            stream.close()


class Service:
    """One model served; every method is called in the event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.phase = Phase.LOADING
        self.active = 0
        self.finished = 0
        self.metrics = ServerMetrics()
        self._loaded: LoadedService | None = None
        self._numbers = itertools.count()
        self._large = ThreadPoolExecutor(LARGE_THREADS, "trimaran-large")
        self._places = asyncio.Semaphore(LARGE_THREADS)
        self._turns = asyncio.Semaphore(LARGE_THREADS)
        self._recent: list[float] = []  # seconds that the last requests took
        self.names: tuple[str, ...] = config.served_model_names
        self.on_drain: set[Callable[[], None]] = set()
        """Called when the server begins to drain."""

    # ------------------------------------------------------------------ life

    def become_ready(self, loaded: LoadedService) -> None:
        """The model is loaded and warmed up: requests are taken from now on."""
        self._loaded = loaded
        self.metrics.attach(loaded.either, self.names[0] if self.names else loaded.name)
        if not self.names:
            self.names = (loaded.name,)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """What runs may end; nothing new is taken."""
        self.phase = Phase.DRAINING
        for told in list(self.on_drain):
            told()

    @property
    def loaded(self) -> LoadedService:
        """The model.

        Raises:
            ApiError: 503 while it is being loaded.
        """
        if self._loaded is None:
            raise unavailable("the model is still being loaded; try again", "loading", 2)
        return self._loaded

    @property
    def engine(self) -> AsyncEngine:
        return self.loaded.engine

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests, or is still being loaded."""
        return self._loaded is None or self._loaded.either.health().ok

    def check_model(self, name: str | None) -> str:
        """The name under which to answer.

        Raises:
            ApiError: 404, no such model; 503 while it is being loaded.
        """
        if not self.names:
            _ = self.loaded
        if name is None or name in self.names:
            if (record := current.get()) is not None:
                record.model = name or self.names[0]
            return name or self.names[0]
        raise ApiError(
            404,
            f"the model '{name}' does not exist; this server has {', '.join(self.names)}",
            "not_found_error",
            "model",
            "model_not_found",
        )

    # ------------------------------------------------------------------ prompts

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt."""
        (found,) = await self.encode_all([prompt], add_special_tokens=add_special_tokens)
        return found

    async def encode_all(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of several prompts."""
        tokenizer = self.loaded.either.core.tokenizer

        def run() -> list[list[int]]:
            return [
                tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt_ids(prompt, tokenizer)
                for prompt in prompts
            ]

        return await self.aside(run, sum(map(len, prompts)))

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which takes time in proportion to `size` (characters or
        tokens): at once where that is little, else on another thread, so that the loop goes on.

        Large ones have threads of their own, so that small ones don't wait for them. One begins
        when the result of another has been taken: else the threads would make results faster
        than the loop can use them, and everybody would wait behind those.
        """
        if size <= LONG_TEXT:
            return work()
        async with self._places:
            return await asyncio.get_running_loop().run_in_executor(self._large, work)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Holds back a request of more than `LONG_TEXT` bytes that takes several pieces of work
        aside, while as many as there are threads for them are in the midst of theirs: what the
        first piece makes is several times as large as the request.
        """
        if size <= LONG_TEXT:
            yield
            return
        async with self._turns:
            yield

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            add_generation_prompt: end with the beginning of the model's answer.
            continue_final_message: end within the last message instead, so that the answer
                continues it.
            **variables: further ones of the template.

        Raises:
            TemplateError: the model has no template, or it refused the messages.
        """
        _ = self.engine  # an encoder answers nobody
        template = self.loaded.template
        if template is None:
            raise TemplateError(
                f"the model '{self.names[0]}' has no chat template; use /v1/completions"
            )
        render = partial(
            template.render,
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **variables,
        )
        size = sum(len(message.get("content") or "") for message in messages)
        if size > LONG_TEXT:
            text = await self.aside(render, size)
        else:  # a template can loop, so it never runs here
            text = await asyncio.to_thread(render)
        if continue_final_message:
            text = _within(text, messages[-1])
        return await self.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------------ requests

    def admit(self, prompts: int, n: int) -> None:
        """Whether a request of so many prompts with `n` choices each would be taken now;
        asked before its prompts are encoded, which can take long.

        Raises:
            ApiError: 429 where too many requests wait, 503 where none is taken, 400 where it
                is too large.
        """
        if self.phase is Phase.DRAINING:
            self.metrics.rejected("draining")
            raise unavailable("the server is shutting down; ask another one", "draining", 5)
        if prompts * n > self.config.max_n:
            raise ApiError(
                400,
                f"{prompts} prompts with n {n} are {prompts * n} sequences, above this server's"
                f" limit of {self.config.max_n}",
                param="n",
                code="invalid_value",
            )
        if self.active + prompts > self.config.max_queue:
            self.metrics.rejected("queue_full")
            raise busy(
                f"{self.active} requests wait or run, of {self.config.max_queue} that this server"
                " takes; try again later",
                self.retry_after(),
            )

    @contextmanager
    def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        texts: Sequence[str | None] = (),
        priority: int = 0,
        cache_salt: str = "",
        slo: str | SloClass = STANDARD,
        retention: Retention | None = None,
    ) -> Iterator[Job]:
        """Hands prompts to the engine; leaving the context aborts what hasn't ended.

        Raises:
            ApiError: as `admit`.
            TrimaranError: a prompt could never be served; none was started then.
        """
        engine = self.engine
        self.admit(len(prompts), params.n)
        begin = asyncio.get_running_loop().time()
        job = Job(
            params,
            list(prompts),
            list(texts) or [None] * len(prompts),
            [],
            begin,
            begin + self.config.request_timeout,
            self.metrics,
        )
        with self._seats(job, len(prompts)), self._recorded(job):
            for prompt in prompts:
                own = self.own_name(request_id)
                job.streams.append(
                    engine.start(
                        prompt,
                        params,
                        request_id=own,
                        priority=priority,
                        cache_salt=cache_salt,
                        slo=slo,
                        retention=retention,
                    )
                )
            yield job

    @contextmanager
    def open(
        self,
        chat: ChatFrame,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[tuple[Job, OpenRequest]]:
        """A request whose last message is still being written; leaving the context aborts it.

        Such requests take half of the queue at most, so that those that are complete find room.

        Raises:
            ApiError: as `admit`.
            TrimaranError: it could never be served, or the engine has no room.
        """
        if self.active >= max(1, self.config.max_queue // 2):
            raise busy("no room for a message that is still being written", self.retry_after())
        self.admit(1, params.n)
        begin = asyncio.get_running_loop().time()
        deadline = begin + self.config.request_timeout
        job = Job(params, [], [None], [], begin, deadline, self.metrics, asked=False)
        with self._seats(job, 1), self._recorded(job):
            opened = self.engine.open(
                params,
                chat=chat,
                request_id=self.own_name(request_id),
                priority=priority,
                cache_salt=cache_salt,
            )
            job.streams.append(opened)
            job.prompts.append(opened.request.prompt)  # which grows
            yield job, opened

    @contextmanager
    def texts(self) -> Iterator[list[EncoderStream | RequestStream]]:
        """For the requests of texts whose vectors are asked for: those put into the list are
        counted, recorded and, where they haven't ended, aborted on leaving the context. However
        many they are, they are one request of those that the server takes.

        Raises:
            ApiError: as `admit`.
        """
        self.admit(1, 1)
        begin = asyncio.get_running_loop().time()
        record, core = current.get(), self.loaded.either.core
        if record is not None:
            record.started(None, core.clock.now())
        streams: list[EncoderStream | RequestStream] = []
        self.active += 1
        try:
            yield streams
        finally:
            if record is not None:
                times = [each.metrics or core.metrics_of(each.request.id) for each in streams]
                record.ended_together(streams, times, core.clock.now())
            self.metrics.ended(streams)
            for stream in streams:
                stream.close()
            self.active -= 1
            self.finished += 1
            self._recent = [*self._recent[-63:], asyncio.get_running_loop().time() - begin]

    def own_name(self, request_id: str) -> str:
        """The engine's name for a request: clients may name theirs, so that alone is no name
        of the engine's, lest two of one name end each other."""
        return f"{request_id}-{next(self._numbers)}"

    def complete(self, job: Job, opened: OpenRequest, whole: str) -> None:
        """The message of a request made by `open` is complete: it is answered now."""
        opened.finish(whole)
        job.asked = True
        job.begin = asyncio.get_running_loop().time()
        job.deadline = job.begin + self.config.request_timeout

    @contextmanager
    def _recorded(self, job: Job) -> Iterator[None]:
        """Tells the record of the HTTP request, if there is one, of its job."""
        record, core = current.get(), self.engine.core
        if record is None:
            yield
            return
        record.started(job.params, core.clock.now())
        try:
            yield
        finally:
            for stream in job.streams if job.asked else ():
                metrics = stream.metrics or core.metrics_of(stream.request.id)
                record.ended(stream, metrics, core.clock.now())

    @contextmanager
    def _seats(self, job: Job, count: int) -> Iterator[None]:
        self.active += count
        try:
            yield
        finally:
            if job.asked:
                self.metrics.ended(job.streams)
                self.finished += count
                seconds = asyncio.get_running_loop().time() - job.begin
                self._recent = [*self._recent[-63:], seconds]
            job.close()
            self.active -= count

    def retry_after(self) -> float:
        """Seconds after which a refused request may find room: the mean of late ones, shared
        by those that run at the same time."""
        if not self._recent:
            return 1.0
        seats = self.loaded.either.core.config.max_num_seqs
        return sum(self._recent) / len(self._recent) * max(1.0, self.active / seats) / seats + 1


async def deltas(job: Job) -> AsyncIterator[tuple[int, list[SequenceDelta]]]:
    """(prompt's index, what has come of it) of all of a job's prompts, as they come.

    Raises:
        ApiError: 504, the time of the request is over.
        RequestFailedError: the engine gave it up.
    """
    loop = asyncio.get_running_loop()
    seconds = job.deadline - loop.time()
    try:
        async with asyncio.timeout_at(job.deadline):
            if len(job.streams) == 1:
                while found := await job.streams[0].ready():
                    job.metrics.came(found)
                    yield 0, found
                return
            waiting = {
                asyncio.ensure_future(stream.ready()): i for i, stream in enumerate(job.streams)
            }
            try:
                while waiting:
                    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        i = waiting.pop(task)
                        if found := task.result():
                            waiting[asyncio.ensure_future(job.streams[i].ready())] = i
                            job.metrics.came(found)
                            yield i, found
            finally:
                for task in waiting:
                    task.cancel()
    except TimeoutError:
        raise timed_out(round(seconds)) from None


async def outputs(job: Job) -> list[RequestOutput]:
    """The whole answers of a job's prompts, in their order; errors as `deltas`."""
    collectors = [
        OutputCollector(stream.request.id, text, prompt, job.params.n)
        for stream, text, prompt in zip(job.streams, job.texts, job.prompts, strict=True)
    ]
    async for i, found in deltas(job):
        for delta in found:
            collectors[i].add(delta)
    return [collector.result() for collector in collectors]


def _within(text: str, message: dict[str, Any]) -> str:
    """A rendered conversation cut off where the text of its last message ends."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    content = content.strip()
    at = text.rfind(content)
    if at < 0:
        raise TemplateError(
            "the chat template changes the text of the last message, so it can't be continued;"
            " leave continue_final_message out"
        )
    return text[: at + len(content)]


def prompts_of(value: Any) -> list[Prompt]:
    """One or several prompts in any of OpenAI's forms: text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    items = list(value)
    if items and isinstance(items[0], int):
        return [items]
    return items
