"""An engine's process, seen from the side that asks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import model_files
from peers.engines.base import Settings
from peers.environments import python_of

WORKER = Path(__file__).with_name("engine_worker.py")
SOURCES = model_files.ROOT / "src"


class EngineDied(Exception):
    """The process ended; what it had to say is on stderr."""


@dataclass
class Worker:
    """A process group that is stopped while it isn't asked anything.

    So no thread of an idle engine spins beside the one that is measured.
    """

    name: str
    process: subprocess.Popen[str]
    load_seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, spec: str, model: str, settings: Settings) -> Worker:
        """Starts an engine by its spec, NAME or NAME:OPTION=VALUE,...

        Raises:
            EngineDied: it couldn't be started.
        """
        engine, options = parse(spec)
        python = python_of(engine)
        path = model_for(engine, model, options)
        command = [str(python), str(WORKER), engine, path]
        command += ["--settings", json.dumps(settings._asdict())]
        command += ["--options", json.dumps(options)]
        environment = dict(os.environ)
        if python == Path(sys.executable):
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
            start_new_session=True,
        )
        worker = cls(spec, process)
        try:
            worker.load_seconds = worker._answer()["load"]
            worker.about = worker._exchange({"task": "describe"})
        except BaseException:  # an end from outside as well
            worker.stop()
            raise
        worker._signal(signal.SIGSTOP)
        return worker

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to one task of `engine_worker.py`.

        Raises:
            EngineDied: it gave none.
        """
        self._signal(signal.SIGCONT)
        try:
            return self._exchange(order)
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Ends the process and those it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _exchange(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
        except BrokenPipeError:
            raise EngineDied(f"{self.name} died; its message is above") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineDied(f"{self.name} died; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """("llama.cpp", {...}) from "llama.cpp:flash_attention=off,q4_0=true"."""
    name, _, tail = spec.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, _, value = item.partition("=")
        options[key] = json.loads(value) if value in ("true", "false") else value
        if value.isdigit():
            options[key] = int(value)
    return name, options


def model_for(engine: str, model: str, options: dict[str, Any]) -> str:
    """The path that an engine is given; takes the options that choose it out of `options`.

    q4_0=true      the weights requantised to Q4_0 (trimaran, llama.cpp)
    format=int8    OpenVINO's own 8 bits, with the GGUF file's tokenizer (openvino)
    """
    if engine in ("vllm", "transformers"):
        return str(model_files.bf16_folder(model))
    if engine == "openvino" and options.pop("format", "gguf") == "int8":
        options["tokenizer"] = str(model_files.source(model))
        return str(model_files.openvino_int8(model, python_of("optimum")))
    if options.pop("q4_0", False):
        return str(model_files.q4_0(model))
    return str(model_files.source(model))
