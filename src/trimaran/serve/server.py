"""Runs the server: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.encoder_core import load_encoder_core
from trimaran.engine.encoder_engine import EncoderEngine
from trimaran.engine.factory import Phases, load_engine
from trimaran.models.encoder_folder import is_encoder
from trimaran.models.store import resolve
from trimaran.serve.app import create_app
from trimaran.serve.config import ServeConfig
from trimaran.serve.http_protocol import LimitedProtocol, limited_protocol
from trimaran.serve.service import LoadedService, Service
from trimaran.serve.session_socket import SessionSocket
from trimaran.serve.tls import TlsServer
from trimaran.serve.traces import Traces
from trimaran.serve.warmup import warm_up, warm_up_encoder

log = logging.getLogger("trimaran")

OTHER_FILES = 256
"""Open files besides connections: the model, libraries, a margin for refused connections."""


class _Server(uvicorn.Server):
    """uvicorn's server with our own way to end: the first signal drains, the second ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, context = self.config, self.config.ssl
        if context is None:
            await super().startup(sockets)
            return

        def make() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        own, connections = self._service.config, self.server_state.connections
        self.servers = [
            TlsServer(each, make, context, connections, own.max_connections, own.header_timeout)  # type: ignore[misc]
            for each in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        if counter % 5 == 0:  # twice a second
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedProtocol):
                    connection.check_patience(now)
        return await super().on_tick(counter)

    def _end(self, number: int) -> None:
        if self.should_exit:
            os._exit(128 + number)  # asked for twice: not a moment longer
        self._service.drain()
        log.info(
            "%s: %d requests may end within %g s; nothing new is taken",
            signal.Signals(number).name,
            self._service.active,
            self._service.config.drain_timeout,
        )
        self.should_exit = True


def run_server(
    model: str | Path,
    engine_config: EngineConfig,
    config: ServeConfig,
    *,
    phases: Phases,
    progress: Callable[[int, int], None] | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves until a signal; everything has ended when it returns.

    The port is taken before the model is loaded: one that is in use is told at once, and
    health checks are answered meanwhile.

    Args:
        ready: called with the server's address once requests are taken.

    Raises:
        ConfigError: the address can't be listened on.
        TrimaranError: the model can't be loaded; of the class that names the trouble.
    """
    listening = _listen(config)
    _allow_files(config.max_connections)
    service = Service(config)
    traces, port = None, listening.getsockname()[1]
    if config.otlp_endpoint is not None:
        traces = Traces(config.otlp_endpoint, port)

    def load() -> LoadedService:
        path = resolve(model, progress=progress)
        if is_encoder(path):
            phases.done("find model")
            core = load_encoder_core(path, engine_config, phases.done)
            if config.pooling not in (None, core.model.pooling):
                raise ConfigError(
                    f"pooling is '{config.pooling}', and the encoder {path.name} was made for"
                    f" '{core.model.pooling}'; leave the option out"
                )
            return LoadedService(None, None, path, EncoderEngine(core))
        loaded = load_engine(model, engine_config, phases=phases, progress=progress)
        return LoadedService(AsyncEngine(loaded.core), loaded.chat_template, loaded.path)

    server = _Server(_uvicorn_config(service, traces, port), service)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(server, service, listening, load, phases, ready))
    finally:
        if traces is not None:
            traces.close()


async def _serve(
    server: _Server,
    service: Service,
    listening: socket.socket,
    load: Callable[[], LoadedService],
    phases: Phases,
    ready: Callable[[str], None],
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    address = _address(service.config, listening)
    loaded: LoadedService | None = None
    try:
        loaded = await asyncio.to_thread(load)
        if loaded.generator is not None:
            await warm_up(loaded.generator, service.config.warmup)
        else:
            assert loaded.encoder is not None
            await warm_up_encoder(loaded.encoder, service.config.warmup)
        phases.done("warm up")
        service.become_ready(loaded)
        if not server.should_exit:
            ready(address)
        await serving
    finally:
        server.should_exit = True
        await serving
        if loaded is not None:
            await loaded.either.close()


def _listen(config: ServeConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listening = socket.create_server(
            (config.host, config.port), family=family, backlog=config.max_connections
        )
        listening.setblocking(False)
        return listening
    except OSError as error:
        raise ConfigError(
            f"can't listen on {config.host}:{config.port}: {error.strerror}; give another --host"
            " or --port"
        ) from None


def _allow_files(connections: int) -> None:
    """Raises the soft limit of open files, where the hard one allows it, so that connections
    are refused with an answer before the system refuses them without one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(config: ServeConfig, listening: socket.socket) -> str:
    scheme = "http" if config.tls_cert is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _uvicorn_config(service: Service, traces: Traces | None, port: int) -> uvicorn.Config:
    config = service.config
    try:
        found = uvicorn.Config(
            create_app(service, traces, port),
            http=limited_protocol(
                config.max_header_bytes,
                config.max_connections,
                config.header_timeout,
                config.write_timeout,
                config.access_log,
            ),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=config.drain_timeout,  # type: ignore[arg-type]
            ws=SessionSocket,
            ws_max_size=config.max_body_bytes,
        )
        found.load()
    except OSError as error:
        raise ConfigError(f"the TLS files can't be used: {error}") from None
    return found


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it costs a third of asyncio's own time a chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
