"""`trimaran serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from trimaran.cli.loading import add_model_flags
from trimaran.cli.options import engine_options, size
from trimaran.cli.parser import EXIT_CODES, Parser
from trimaran.cli.terminal import DownloadReport, StartupReport, say
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.serve.config import ServeConfig

EPILOG = f"""\
examples:
  trimaran serve
  trimaran serve --model ./model.gguf --host 0.0.0.0 --port 9000 --api-key-file keys.txt
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

SIGTERM or Ctrl-C lets running requests end and refuses new ones; a second one ends at once.

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran serve [OPTION ...]",
        description="Serves a model with OpenAI's API until SIGTERM or Ctrl-C.",
        epilog=EPILOG,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("server")
    for flag, kind, text in _FLAGS:
        group.add_argument(
            flag,
            metavar=kind[0],
            type=kind[1],
            dest="serve." + flag[2:].replace("-", "_"),
            default=argparse.SUPPRESS,
            help=text,
        )
    for flag, text in _LISTS:
        group.add_argument(
            flag,
            metavar="TEXT",
            action="append",
            dest="serve." + flag[2:].replace("-", "_"),
            default=argparse.SUPPRESS,
            help=text + "; may be repeated",
        )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a file of API keys, one a line: unlike --api-key it doesn't show in process lists",
    )
    group.add_argument(
        "--no-access-log",
        action="store_false",
        dest="serve.access_log",
        default=argparse.SUPPRESS,
        help="write no line for each request",
    )
    group.add_argument(
        "--log-json",
        action="store_true",
        dest="serve.log_json",
        default=argparse.SUPPRESS,
        help="write log lines as JSON objects",
    )
    return parser


_NUMBER: tuple[str, Any] = ("N", int)
_SECONDS: tuple[str, Any] = ("SECONDS", float)
_TEXT: tuple[str, Any] = ("TEXT", str)
_SIZE: tuple[str, Any] = ("SIZE", size)

_FLAGS: list[tuple[str, tuple[str, Any], str]] = [
    ("--host", _TEXT, "address to listen on (default: 127.0.0.1, this machine only)"),
    ("--port", _NUMBER, "port to listen on, 0 takes a free one (default: 8000)"),
    ("--root-path", _TEXT, "path under which a proxy shows this server"),
    ("--tls-cert", _TEXT, "PEM file of a certificate, for HTTPS"),
    ("--tls-key", _TEXT, "PEM file of its key"),
    ("--max-queue", _NUMBER, "requests waiting or running; more get 429 (default: 512)"),
    ("--max-connections", _NUMBER, "open connections (default: 1024)"),
    ("--max-body-bytes", _SIZE, "largest body of a request (default: 8MiB)"),
    ("--max-header-bytes", _SIZE, "largest head of a request (default: 64KiB)"),
    ("--max-n", _NUMBER, "sequences one request may ask for, prompts times n (default: 128)"),
    (
        "--pooling",
        _TEXT,
        "mean or last: /v1/embeddings of a model that generates (default: if asked)",
    ),
    ("--max-logprobs", _NUMBER, "likely tokens a request may ask for (default: 20)"),
    ("--header-timeout", _SECONDS, "for a request's head to arrive (default: 10)"),
    ("--body-timeout", _SECONDS, "for a request's body to arrive (default: 30)"),
    ("--request-timeout", _SECONDS, "for a request as a whole (default: 600)"),
    ("--write-timeout", _SECONDS, "that a client may take nothing (default: 60)"),
    ("--session-timeout", _SECONDS, "that a /v1/realtime session may be silent (default: 600)"),
    ("--keep-alive", _SECONDS, "that an unused connection stays open (default: 30)"),
    ("--drain-timeout", _SECONDS, "for running requests to end after SIGTERM (default: 30)"),
    ("--otlp-endpoint", _TEXT, "collector of traces, such as http://localhost:4318; needs [otel]"),
    ("--warmup", _NUMBER, "rounds of dummy requests before the server is ready (default: 2)"),
]
_LISTS = [
    ("--served-model-name", "a name that requests may give for the model"),
    ("--api-key", "a key of which requests must carry one"),
    ("--cors-origin", "a web origin whose pages may call, or '*'"),
]
_PLURAL = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
}


def run(args: argparse.Namespace) -> int:
    """Exit code of the command: 0 after SIGTERM or Ctrl-C.

    Raises:
        TrimaranError: what is wrong with the options or the model.
    """
    config = serve_config(args)
    set_up_logs(config.log_json)
    startup = StartupReport(verbose=True)
    startup.rest("start Python")
    from trimaran.engine.factory import Phases
    from trimaran.serve.server import run_server

    startup.rest("import server")
    download = DownloadReport(args.model)

    def ready(address: str) -> None:
        startup.end("ready")
        say(f"Trimaran serves {args.model} at {address}/v1 (Ctrl-C ends it).")

    try:
        run_server(
            args.model,
            EngineConfig.from_mapping(engine_options(args)),
            config,
            phases=Phases(report=startup.phase),
            progress=download,
            ready=ready,
        )
    finally:
        download.close()
    return 0


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """The server's options of a command line.

    Raises:
        ConfigError: a bad value, or a file of keys that can't be read.
    """
    given: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name.startswith("serve."):
            name = name.removeprefix("serve.")
            given[_PLURAL.get(name, name)] = tuple(value) if name in _PLURAL else value
    if args.api_key_file:
        try:
            lines = Path(args.api_key_file).read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the key file '{args.api_key_file}' can't be read: {error}"
            ) from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"the key file '{args.api_key_file}' has no keys; give one a line")
        given["api_keys"] = (*given.get("api_keys", ()), *keys)
    return ServeConfig(**given)


def set_up_logs(as_json: bool) -> None:
    """Log lines of the package go to standard error, as text or as JSON objects."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _TextLines())
    for name in ("trimaran", "uvicorn", "opentelemetry"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
    logging.getLogger("trimaran").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)


_EXTRA = ("request_id", "method", "path", "status", "seconds", "client")


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = f"{when} {record.levelname.lower():<7} {record.getMessage()}"
        if hasattr(record, "request_id"):
            text += f" {record.seconds * 1000:.1f} ms [{record.request_id}]"  # type: ignore[attr-defined]
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        found |= {name: getattr(record, name) for name in _EXTRA if hasattr(record, name)}
        found |= getattr(record, "engine", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)
