"""The options of a server."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.core.errors import ConfigError
from trimaran.core.pooling import POOLINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of one server; limits are there so that no client can hurt another.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        served_model_names: names that requests may give for the model; the first one is
            shown. Empty: the model's own name.
        api_keys: keys of which a request must carry one; empty: none is asked for.
        cors_origins: web origins whose pages may call; ("*",) is every one.
        root_path: path under which a proxy shows this server.
        tls_cert, tls_key: PEM files; both make the server speak HTTPS.
        max_queue: requests that wait or run at once; more are refused with 429.
        max_connections: open connections; more are closed at once.
        max_body_bytes: of a request.
        max_header_bytes: of a request line and its headers.
        max_n: sequences that one HTTP request may ask for, prompts times n.
        pooling: how `/v1/embeddings` pools where a request doesn't say, of a model that
            generates ("mean" or "last"); None: such requests are refused.
        max_logprobs: most likely tokens that a request may ask for.
        header_timeout: seconds for the headers of a request to arrive.
        body_timeout: seconds for the body of a request to arrive.
        request_timeout: seconds from a request's arrival to the end of its answer.
        write_timeout: seconds that a client may take nothing while something is ready for it.
        session_timeout: seconds that a `/v1/realtime` session may be silent.
        keep_alive: seconds that an unused connection stays open.
        drain_timeout: seconds that running requests have to end after SIGTERM.
        warmup: dummy requests run before the server is ready; 0: none.
        otlp_endpoint: of a collector that speaks OTLP over HTTP, to which traces go; None: no
            traces. Needs the extra `otel`.
        access_log: a line a request on standard error.
        log_json: log lines are JSON objects.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    max_queue: int = 512
    max_connections: int = 1024
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 64 << 10
    max_n: int = 128
    pooling: str | None = None
    max_logprobs: int = 20
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    request_timeout: float = 600.0
    write_timeout: float = 60.0
    session_timeout: float = 600.0
    keep_alive: float = 30.0
    drain_timeout: float = 30.0
    warmup: int = 2
    otlp_endpoint: str | None = None
    access_log: bool = True
    log_json: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        for name in ("max_queue", "max_connections", "max_body_bytes", "max_header_bytes", "max_n"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in (
            "header_timeout",
            "body_timeout",
            "request_timeout",
            "write_timeout",
            "session_timeout",
            "keep_alive",
            "drain_timeout",
        ):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds up to a day")
        if self.pooling not in (None, *POOLINGS):
            raise ConfigError(f"pooling is '{self.pooling}'; give one of {', '.join(POOLINGS)}")
        if self.warmup < 0 or self.max_logprobs < 0:
            raise ConfigError("warmup and max_logprobs can't be negative; give 0 or more")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; give both or neither")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path is '{self.root_path}'; it must begin with '/'")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty or has blanks or non-ASCII text; give another")
