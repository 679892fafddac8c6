"""`trimaran chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from trimaran.cli.conversation import Conversation
from trimaran.cli.line_input import LineInput
from trimaran.cli.loading import add_model_flags, load_llm
from trimaran.cli.options import add_sampling_flags, sampling_options
from trimaran.cli.parser import EXIT_CODES, FAILED, Parser
from trimaran.cli.records import check_unicode
from trimaran.cli.terminal import StartupReport, say
from trimaran.core.errors import EngineClosedError, TrimaranError, nearest
from trimaran.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimaran.engine.llm import LLM

DEFAULTS = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}
NOT_IN_A_CHAT = frozenset({"n", "logprobs", "prompt_logprobs"})

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, keep the system message",
    "/system": "/system TEXT sets the system message; alone it shows it",
    "/exit": "leave, as Ctrl-D does",
}

EPILOG = f"""\
examples:
  trimaran chat
  trimaran chat --model ./model.gguf --system "You answer in one sentence."
  printf 'What is 2+2?\\nAnd twice that?\\n' | trimaran chat --temperature 0

in the chat:
{chr(10).join(f"  {name:<10} {text}" for name, text in COMMANDS.items())}
  Ctrl-C     stop the answer; what was said stays in the conversation
  Ctrl-D     leave

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran chat [OPTION ...]",
        description="A conversation with a model in the terminal, or with each line of a pipe.",
        epilog=EPILOG,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    parser.add_argument(
        "--no-history",
        action="store_true",
        help="neither read nor keep the lines typed before",
    )
    add_model_flags(parser)
    add_sampling_flags(parser, DEFAULTS, NOT_IN_A_CHAT)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command.

    Raises:
        TrimaranError: what is wrong with the options or the model.
    """
    startup = StartupReport(args.verbose)
    params = SamplingParams.from_mapping(DEFAULTS | sampling_options(args))
    with load_llm(args, startup) as llm:
        conversation = Conversation(llm, params, args.system)
        line_input = LineInput(keep_history=not args.no_history)
        if line_input.interactive:
            say(_greeting(llm))
        try:
            return Chat(conversation, line_input, args.verbose, startup).run()
        finally:
            line_input.close()


class Chat:
    """The loop of a chat: a line in, an answer out."""

    def __init__(
        self,
        conversation: Conversation,
        line_input: LineInput,
        verbose: bool,
        startup: StartupReport,
    ) -> None:
        self._conversation = conversation
        self._input = line_input
        self._verbose = verbose
        self._startup = startup
        self._failed = False

    def run(self) -> int:
        """Until the input ends or /exit; returns the exit code: with lines from a pipe, 1
        when one of them could not be answered."""
        while (line := self._input.read()) is not None:
            text = line.strip()
            if re.fullmatch(r"/[a-z]+(\s.*)?", text, re.DOTALL):
                if not self._command(text):
                    break
            elif text:
                self._answer(text)
        return FAILED if self._failed and not self._input.interactive else 0

    def _command(self, text: str) -> bool:
        """Obeys a command; returns whether the chat goes on."""
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self._conversation.reset()
            say("The conversation is forgotten.")
        elif name == "/system":
            if rest.strip():
                self._conversation.system = rest.strip()
            say(f"System message: {self._conversation.system or '(none)'}")
        elif name == "/help":
            say("\n".join(f"{name:<10} {text}" for name, text in COMMANDS.items()))
        else:
            say(f"There is no command '{name}'.{nearest(name, COMMANDS)} /help lists them.")
        return True

    def _answer(self, text: str) -> None:
        conversation = self._conversation
        try:
            check_unicode(text, "the message")
            dropped = conversation.make_room(text)
            if dropped:
                say(f"(The context is full; the oldest {dropped} messages were dropped.)")
            with closing(conversation.answer(text)) as pieces:
                for piece in pieces:
                    self._startup.end("first token")
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._input.interactive:
                raise
            sys.stdout.write("\n")
            say("(Stopped. Ctrl-D leaves.)")
            return
        except EngineClosedError:
            raise
        except TrimaranError as error:
            self._failed = True
            say(f"trimaran: {error}")
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self._verbose:
            say(f"({conversation.rates()})")


def _greeting(llm: LLM) -> str:
    about = llm.describe()
    engine = ", ".join(str(about[key]) for key in ("backend", "isa") if about.get(key))
    return (
        f"{llm.path.name} on {engine}; up to {llm.max_model_len} tokens.\n"
        "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
    )
