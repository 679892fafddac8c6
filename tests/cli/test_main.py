"""The command as a whole: help, exit codes, errors, encodings, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import COMMAND, environment, run

from trimaran import __version__
from trimaran.cli.loading import add_model_flags
from trimaran.cli.main import COMMANDS
from trimaran.cli.parser import Parser
from trimaran.models.store import DEFAULT_MODEL


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: trimaran {command}".rstrip())
    assert "examples:" in done.stdout
    assert "exit codes:" in done.stdout
    assert done.stderr == ""


def test_without_a_command_the_help_is_shown() -> None:
    assert run().stdout == run("--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"trimaran {__version__}\n"


def test_help_loads_neither_numpy_nor_the_engine() -> None:
    script = (
        "import sys; from trimaran.cli.main import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'trimaran.engine.llm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"[]"


def test_the_help_names_the_default_model() -> None:
    parser = Parser(usage="x", description="")
    add_model_flags(parser)
    assert f"(default: {DEFAULT_MODEL})" in parser.format_help()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("genrate", "unknown command 'genrate'. Did you mean 'generate'?"),
        ("--versoin", "unknown option '--versoin'. Did you mean '--version'?"),
        ("generate x --temprature 1", "unknown option '--temprature'. Did you mean '--temp"),
        ("generate x --temp 1", "unknown option '--temp'."),
        ("generate x y", "'y' is one argument too many"),
        ("generate x --top-k many", "argument --top-k: 'many' isn't a whole number"),
        ("generate x --top-p 2", "top_p is 2.0; give 0.0 to 1.0"),
        ("generate x --input f", "give a prompt or --input, not both"),
        ("generate --input f --output f", "it would be overwritten"),
        ("generate --input f --chat", 'a conversation is a line with "messages"'),
        ("generate x --system y", "--system is for a conversation; add --chat"),
        ("generate x --logprobs 1", "logprobs has no place in plain text; add --json"),
        ("chat --n 2", "unknown option '--n'"),
    ],
)
def test_a_wrong_command_line_exits_with_2(words: str, message: str) -> None:
    done = run(*words.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_wrong_engine_option_exits_with_2(tiny: list[str]) -> None:
    done = run("generate", "a", *tiny, "--isa", "avx3")
    assert done.returncode == 2
    assert "isa is 'avx3'; give one of auto, amx" in done.stderr


def test_an_error_is_one_line_and_a_traceback_where_it_is_asked_for() -> None:
    words = ["generate", "a", "--model", "nowhere.gguf"]
    done = run(*words, env={"TRIMARAN_DEBUG": None})
    assert done.returncode == 1
    assert done.stderr.startswith("trimaran: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere.gguf" in done.stderr
    debugged = run(*words, env={"TRIMARAN_DEBUG": "1"})
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr
    assert debugged.stderr.endswith(done.stderr)


def test_a_file_that_cannot_be_opened_is_named(tiny: list[str], tmp_path: Path) -> None:
    missing = run("generate", *tiny, "--input", str(tmp_path / "none.jsonl"))
    assert missing.returncode == 1
    assert missing.stderr == f"trimaran: '{tmp_path / 'none.jsonl'}': No such file or directory\n"
    unwritable = run("generate", "a", *tiny, "--output", str(tmp_path / "none" / "x"))
    assert unwritable.returncode == 1
    assert "No such file or directory" in unwritable.stderr


@pytest.mark.parametrize("locale", ["C", "POSIX", "de_DE.ISO-8859-1"])
def test_output_is_utf8_in_every_locale(tiny: list[str], locale: str) -> None:
    line = json.dumps({"id": "é\u2028😀", "prompt": "ab", "max_tokens": 1}, ensure_ascii=False)
    env = {"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("generate", *tiny, "--input", "-", stdin=line, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == "é\u2028😀"
    assert "é" in done.stdout


def test_a_reader_that_goes_away_ends_it_quietly(endless: list[str]) -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "generate", "abc", *endless],
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(write)
    assert os.read(read, 1)  # as `head -c 1` does
    os.close(read)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


def test_help_into_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_exits_with_130(endless: list[str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "abc", *endless],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith(b"trimaran: interrupted\n")
    assert process.returncode == 130
