"""`trimaran chat`, typed into a terminal and piped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command_line import Terminal, run, write_tiny_model

from trimaran import LLM, SamplingParams
from trimaran.cli.conversation import Conversation


@pytest.fixture
def own_history(tmp_path: Path) -> dict[str, str | None]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_a_conversation_in_a_terminal(
    tiny: list[str], own_history: dict[str, str | None], tmp_path: Path
) -> None:
    words = ["chat", *tiny, "--verbose", "--ignore-eos", "--max-tokens", "6"]
    with Terminal(*words, env=own_history) as terminal:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        terminal.type("abc\n")
        first = terminal.wait_for(r"\((\d+) prompt tokens.* 6 tokens generated")
        terminal.wait_for("> ")
        terminal.type("d\n")
        second = terminal.wait_for(r"\((\d+) prompt tokens.* 6 tokens generated")
        # The second prompt is the first, its answer and one more letter.
        assert int(second[1]) > int(first[1])
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("The conversation is forgotten")
        terminal.type("abc\n")
        third = terminal.wait_for(r"\((\d+) prompt tokens")
        assert third[1] == first[1]
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0
    typed = (tmp_path / "trimaran" / "chat-history").read_text().splitlines()
    assert typed == ["abc", "d", "/reset", "abc"]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    endless: list[str], own_history: dict[str, str | None]
) -> None:
    with Terminal("chat", *endless, "--no-history", env=own_history) as terminal:
        terminal.wait_for("> ")
        terminal.type("abc\n")
        terminal.wait_for(r"\n\S{20}")
        terminal.type("\x03")
        terminal.wait_for(r"\(Stopped\. Ctrl-D leaves\.\)")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.press_until("\x03", r"\(Ctrl-D or /exit leaves\.\)")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.wait_for_exit() == 0
    assert not Path(str(own_history["XDG_STATE_HOME"]), "trimaran").exists()


def test_commands(tiny: list[str], own_history: dict[str, str | None]) -> None:
    lines = [
        "/help",
        "/rest",
        "/system",
        "/system be brief",
        "/system",
        "/usr/bin is a folder",
        "/exit",
    ]
    done = run("chat", *tiny, "--max-tokens", "2", stdin="\n".join(lines), env=own_history)
    assert done.returncode == 0
    for shown in ("/reset     forget", "There is no command '/rest'. Did you mean '/reset'?"):
        assert shown in done.stderr
    assert re.findall("System message: (.*)", done.stderr) == ["(none)", "be brief", "be brief"]
    assert done.stdout.count("\n") == 1  # the only message was the one about /usr


def test_a_pipe_gets_an_answer_a_line(tiny: list[str], tiny_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(tiny_path, backend="reference", kv_cache_bytes=1 << 20) as llm:
        first = llm.chat([{"role": "user", "content": "abc"}], params)[0].text
        messages = [
            {"role": "user", "content": "abc"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "d"},
        ]
        second = llm.chat(messages if first else messages[2:], params)[0].text
    done = run("chat", *tiny, "--temperature", "0", "--max-tokens", "6", stdin="abc\n\nd")
    assert done.stdout == f"{first}\n{second}\n"
    assert done.stderr == ""


def test_a_message_that_cannot_be_answered_is_told_and_taken_back(tiny: list[str]) -> None:
    long = "abcdefgh" * 40  # the context is 128 tokens
    done = run("chat", *tiny, "--max-tokens", "2", stdin=f"ab\n{long}\ncd\n")
    assert done.returncode == 1
    assert "fit max_model_len 128" in done.stderr
    assert done.stdout.count("\n") == 2


def test_the_oldest_turns_make_room(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, skip_special_tokens=False)
    with LLM(path, backend="reference", kv_cache_bytes=1 << 20) as llm:
        conversation = Conversation(llm, params, system="h")
        dropped = 0
        for _ in range(12):
            dropped += conversation.make_room("efghefgh")
            assert any(conversation.answer("efghefgh"))
            roles = [message["role"] for message in conversation.messages]
            assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        assert dropped > 0
        assert dropped % 2 == 0
        assert len(conversation.messages) == 1 + 2 * 12 - dropped


def test_an_answer_left_early_keeps_what_was_said(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=None, ignore_eos=True, skip_special_tokens=False, seed=1)
    with LLM(path, backend="reference", kv_cache_bytes=1 << 20) as llm:
        conversation = Conversation(llm, params)
        pieces = conversation.answer("abc")
        said = next(pieces) + next(pieces)
        pieces.close()
        assert conversation.messages[-1] == {"role": "assistant", "content": said}
        # The engine has let go of it: the next one is served at once.
        assert any(conversation.answer("d"))


def test_nothing_said_takes_the_message_back(tiny_path: Path) -> None:
    with LLM(tiny_path, backend="reference", kv_cache_bytes=1 << 20) as llm:
        # The first token is the end of the sequence, which is no text.
        params = SamplingParams(logit_bias={2: 1e4}, max_tokens=5)
        conversation = Conversation(llm, params)
        assert "".join(conversation.answer("abc")) == ""
        assert conversation.messages == []


def test_the_default_model_answers(smollm2_path: Path) -> None:
    words = ["chat", "--model", str(smollm2_path), "--kv-cache-bytes", "64MiB"]
    flags = ["--temperature", "0", "--max-tokens", "24"]
    done = run(*words, *flags, stdin="What is the capital of France?\n")
    assert done.returncode == 0
    assert "Paris" in done.stdout
