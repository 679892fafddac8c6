"""`trimaran generate`: answers one prompt, or a file of requests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from trimaran.cli.batch import answer_lines
from trimaran.cli.loading import add_model_flags, load_llm
from trimaran.cli.options import add_sampling_flags, sampling_options
from trimaran.cli.parser import EXIT_CODES, Parser
from trimaran.cli.records import Ask, answer_record, check_unicode, to_json
from trimaran.cli.running import Running
from trimaran.cli.terminal import StartupReport, say
from trimaran.core.errors import ConfigError
from trimaran.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimaran.engine.llm import LLM

DEFAULTS = {"max_tokens": 256}

EPILOG = f"""\
examples:
  trimaran generate "The capital of France is" --temperature 0 --max-tokens 8
  trimaran generate --chat "Write a haiku about the sea." --temperature 0.3
  cat essay.txt | trimaran generate --chat --system "Summarise briefly."
  trimaran generate --input requests.jsonl --output answers.jsonl

a line of the input:
  {{"id": "a", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}}
  {{"id": "b", "messages": [{{"role": "user", "content": "Hello"}}], "logprobs": 2}}
  {{"id": "c", "prompt_token_ids": [504, 3575]}}

Each line has one of prompt, messages and prompt_token_ids, perhaps an id, and any sampling
parameter under the name of its flag, with _ for -; it goes before the flag. Answers come in
the order of the lines. A line that can't be served gets a record with an error instead, the
others go on, and the exit code is 1.

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran generate [OPTION ...] [PROMPT]",
        description="Answers a prompt, streaming the text; or a JSONL file, with a record a line.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; '-' or none: standard input",
    )
    parser.add_argument(
        "-i",
        "--input",
        metavar="FILE",
        help="JSONL with a request a line; '-': standard input",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where JSON records go (default: standard output)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="answer one prompt with a JSON record, not as text",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take the prompt for a user's message and put it through the model's chat template",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="no progress bar and no rates at the end",
    )
    add_model_flags(parser)
    add_sampling_flags(parser, DEFAULTS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command.

    Raises:
        TrimaranError: what is wrong with the options, the model, or the one prompt.
    """
    _check(args)
    startup = StartupReport(args.verbose)
    defaults = DEFAULTS | sampling_options(args)
    params = SamplingParams.from_mapping(defaults)  # wrong flags are told before the model loads
    if args.input is not None:
        with ExitStack() as stack:
            lines = stack.enter_context(_reading(args.input))
            target = stack.enter_context(_writing(args.output))
            llm = stack.enter_context(load_llm(args, startup))
            return answer_lines(llm, lines, target, defaults, args.quiet, startup)
    ask = _ask(args, params)
    if args.json or args.output is not None:
        with _writing(args.output) as target, load_llm(args, startup) as llm:
            return _answer_as_record(llm, ask, target, args.quiet)
    with load_llm(args, startup) as llm:
        return _answer_as_text(llm, ask, args.quiet, startup)


def _check(args: argparse.Namespace) -> None:
    if args.input is not None and args.prompt is not None:
        raise ConfigError("give a prompt or --input, not both")
    if args.input is not None and (args.chat or args.system is not None):
        raise ConfigError('with --input a conversation is a line with "messages", not --chat')
    if args.system is not None and not args.chat:
        raise ConfigError("--system is for a conversation; add --chat")
    as_text = args.input is None and args.output is None and not args.json
    asked = sampling_options(args)
    for name in ("logprobs", "prompt_logprobs"):
        if as_text and name in asked:
            raise ConfigError(f"{name} has no place in plain text; add --json")
    if args.input not in (None, "-") and args.input == args.output:
        raise ConfigError(f"--input and --output are both '{args.input}'; it would be overwritten")


def _ask(args: argparse.Namespace, params: SamplingParams) -> Ask:
    prompt = args.prompt
    if prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise ConfigError('give a prompt, as in: trimaran generate "The capital of France is"')
        prompt = sys.stdin.read().removesuffix("\n")
    check_unicode(prompt, "the prompt")
    if not args.chat:
        return Ask(None, 1, prompt, params)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return Ask(None, 1, messages, params, chat=True)


def _answer_as_record(llm: LLM, ask: Ask, target: TextIO, quiet: bool) -> int:
    running = Running(llm, ask)
    output = running.finish()
    print(to_json(answer_record(ask, output)), file=target, flush=True)
    if not quiet:
        say(running.rates())
    return 0


def _answer_as_text(llm: LLM, ask: Ask, quiet: bool, startup: StartupReport) -> int:
    running = Running(llm, ask)
    if ask.params.n == 1:
        try:
            for text in running.texts():
                startup.end("first token")
                sys.stdout.write(text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(flush=True)
            raise
        print(flush=True)
    else:
        for one in running.finish().outputs:
            print(f"--- {one.index + 1} of {ask.params.n} ---\n{one.text}", flush=True)
    if not quiet:
        say(running.rates())
    return 0


@contextmanager
def _reading(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdin
    else:
        with open(name, encoding="utf-8", errors="surrogateescape") as file:
            yield file


@contextmanager
def _writing(name: str | None) -> Iterator[TextIO]:
    if name in (None, "-"):
        yield sys.stdout
    else:
        with open(name, "w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
