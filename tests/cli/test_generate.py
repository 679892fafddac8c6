"""`trimaran generate`: prompts, standard input and JSONL; text, records and rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Terminal, run

from trimaran import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Any:
    with LLM(tiny_path, backend="reference", kv_cache_bytes=1 << 20) as llm:
        yield llm


def expected(llm: LLM, prompt: str, **params: Any) -> str:
    return llm.generate(prompt, SamplingParams(**params))[0].text


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt_gives_its_text_and_the_rates(tiny: list[str], llm: LLM) -> None:
    done = run("generate", "abc", *tiny, "--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    assert done.returncode == 0
    text = expected(llm, "abc", temperature=0, max_tokens=5, ignore_eos=True)
    assert done.stdout == text + "\n"
    prompt = len(llm.tokenizer.encode("abc"))
    assert done.stderr.startswith(f"{prompt} prompt tokens · first token after ")
    assert " · 5 tokens generated, " in done.stderr
    assert done.stderr.endswith(" tokens/s\n")


@pytest.mark.parametrize("words", [[], ["-"]])
def test_the_prompt_from_standard_input(tiny: list[str], llm: LLM, words: list[str]) -> None:
    flags = ["--temperature", "0", "--max-tokens", "5", "--quiet"]
    done = run("generate", *words, *tiny, *flags, stdin="abc\n")
    assert done.stdout == expected(llm, "abc", temperature=0, max_tokens=5) + "\n"
    assert done.stderr == ""


def test_a_seed_makes_it_repeatable(tiny: list[str], llm: LLM) -> None:
    flags = ["--seed", "3", "--max-tokens", "20", "--quiet", "--ignore-eos"]
    text = expected(llm, "abc", seed=3, max_tokens=20, ignore_eos=True)
    assert run("generate", "abc", *tiny, *flags).stdout == text + "\n"


def test_chat_goes_through_the_template(tiny: list[str], llm: LLM) -> None:
    flags = ["--temperature", "0", "--max-tokens", "5", "--json", "--quiet"]
    done = run("generate", "--chat", "--system", "ab", "cd", *tiny, *flags)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=5))[0]
    (record,) = records(done.stdout)
    assert record["outputs"][0]["token_ids"] == answer.outputs[0].token_ids
    assert record["prompt_tokens"] == len(answer.prompt_token_ids)


def test_json_has_what_was_asked_for(tiny: list[str]) -> None:
    flags = ["--json", "--n", "2", "--seed", "1", "--max-tokens", "3", "--ignore-eos"]
    done = run("generate", "abc", *tiny, *flags, "--logprobs", "2", "--prompt-logprobs", "0")
    (record,) = records(done.stdout)
    assert record.keys() == {
        "id",
        "line",
        "outputs",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "prompt_logprobs",
    }
    assert record["completion_tokens"] == 6
    assert record["prompt_logprobs"][0] is None
    assert len(record["prompt_logprobs"]) == record["prompt_tokens"]
    for index, output in enumerate(record["outputs"]):
        assert output["index"] == index
        assert output["finish_reason"] == "length"
        for token, entries in zip(output["token_ids"], output["logprobs"], strict=True):
            assert entries[0]["token_id"] == token
            assert len(entries) in (2, 3)  # the chosen one may be among the likeliest


def test_several_sequences_as_text(tiny: list[str], llm: LLM) -> None:
    flags = ["--n", "2", "--seed", "1", "--max-tokens", "8", "--quiet"]
    outputs = llm.generate("abc", SamplingParams(n=2, seed=1, max_tokens=8))[0].outputs
    assert run("generate", "abc", *tiny, *flags).stdout == (
        f"--- 1 of 2 ---\n{outputs[0].text}\n--- 2 of 2 ---\n{outputs[1].text}\n"
    )


LINES = [
    '{"id": "first", "prompt": "abc", "max_tokens": 4}',
    "",
    "{oops",
    '{"id": 4, "prompt_token_ids": [4, 5], "temperature": 0.5, "seed": 1}',
    '{"id": 5, "prompt_token_ids": [4, 99]}',
    '{"id": 6, "messages": [{"role": "user", "content": "ab"}]}',
    '{"id": 7, "prompt": "a", "max_tokns": 3}',
    '{"id": 8, "prompt": "ab"}',
    b'{"id": 9, "prompt": "\xff"}'.decode("utf-8", "surrogateescape"),
]


def test_a_bad_line_gets_an_error_and_the_others_go_on(
    tiny: list[str], llm: LLM, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes("\n".join(LINES).encode("utf-8", "surrogateescape"))
    files = ["--input", str(source), "--output", str(target)]
    done = run("generate", *tiny, *files, "--temperature", "0", "--max-tokens", "6")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "requests: 8 in " in done.stderr
    assert done.stderr.endswith("trimaran: 4 of 8 requests failed; see their records\n")
    written = records(target.read_text())
    assert [(r["id"], r["line"]) for r in written] == [
        ("first", 1),
        (None, 3),
        (4, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 8),
        (None, 9),
    ]
    by_line = {record["line"]: record for record in written}
    errors = {line: r["error"] for line, r in by_line.items() if "error" in r}
    assert errors.keys() == {3, 5, 7, 9}
    assert errors[3]["message"].startswith("not a JSON object: Expecting property name")
    assert errors[5] == {
        "type": "RequestError",
        "message": "the prompt has token id 99; this model's are 0 to 11",
    }
    assert errors[7]["message"] == "unknown field 'max_tokns'. Did you mean 'max_tokens'?"
    assert "isn't valid Unicode" in errors[9]["message"]
    assert by_line[1]["outputs"][0]["text"] == expected(llm, "abc", temperature=0, max_tokens=4)
    assert by_line[8]["outputs"][0]["text"] == expected(llm, "ab", temperature=0, max_tokens=6)


def test_many_lines_come_back_in_order(tiny: list[str], llm: LLM) -> None:
    # More than the engine is handed at once, of lengths that end in another order.
    count = 40
    lines = [
        json.dumps({"id": i, "prompt": "ab", "seed": i, "max_tokens": 1 + (7 * i) % 31})
        for i in range(count)
    ]
    done = run("generate", *tiny, "--max-num-seqs", "4", "--input", "-", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    written = records(done.stdout)
    assert [record["id"] for record in written] == list(range(count))
    params = [SamplingParams(seed=i, max_tokens=1 + (7 * i) % 31) for i in range(count)]
    for record, output in zip(written, llm.generate(["ab"] * count, params), strict=True):
        assert record["outputs"][0]["token_ids"] == output.outputs[0].token_ids


def test_a_progress_bar_on_a_terminal(tiny: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "abc", "max_tokens": 9}\n' * 3)
    words = ["generate", *tiny, "--input", str(source), "--output", str(target)]
    with Terminal(*words) as terminal:
        terminal.wait_for(r"requests  \[[#-]+\]")
        terminal.wait_for(r"requests: 3 in .* tokens/s")
        assert terminal.wait_for_exit() == 0
    assert len(records(target.read_text())) == 3


def test_a_terminal_without_a_prompt_is_told_what_to_give(tiny: list[str]) -> None:
    with Terminal("generate", *tiny) as terminal:
        terminal.wait_for("give a prompt, as in")
        assert terminal.wait_for_exit() == 2


def test_verbose_prints_the_phases(tiny: list[str]) -> None:
    done = run("generate", "abc", *tiny, "--verbose", "--max-tokens", "2")
    phases = [line[2:20].strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert phases == [
        "start Python",
        "import engine",
        "find model",
        "read checkpoint",
        "build tokenizer",
        "pack weights",
        "allocate cache",
        "start engine",
        "first token",
        "total",
    ]
    assert "KV cache: " in done.stderr


def test_the_default_model_knows_the_capital_of_france(smollm2_path: Path) -> None:
    words = ["The capital of France is", "--model", str(smollm2_path), "--temperature", "0"]
    done = run("generate", *words, "--max-tokens", "4", "--kv-cache-bytes", "64MiB")
    assert done.returncode == 0
    assert "Paris" in done.stdout
