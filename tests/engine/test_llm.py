"""The offline interface, on a small model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import in_fork

from trimaran import LLM, Retention, SamplingParams
from trimaran.core.errors import (
    ConfigError,
    EngineClosedError,
    ModelNotFoundError,
    ParameterError,
    RequestError,
    TemplateError,
)
from trimaran.core.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, kv_cache_bytes=64 << 20) as llm:
        yield llm


def test_it_answers(llm: LLM) -> None:
    output = llm.chat(QUESTION, GREEDY)[0]
    assert "Paris" in output.text
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.finished


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    deltas = list(llm.stream_chat(QUESTION, GREEDY))
    assert "".join(delta.text for delta in deltas) == llm.chat(QUESTION, GREEDY)[0].text
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_text_ids_and_lists_of_either(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.tokenizer.encode(text)
    answers = [
        llm.generate(text, GREEDY),
        llm.generate(ids, GREEDY),
        llm.generate([text], GREEDY),
        llm.generate([ids], [GREEDY]),
    ]
    assert {len(outputs) for outputs in answers} == {1}
    assert len({outputs[0].text for outputs in answers}) == 1
    assert answers[0][0].prompt == text
    assert answers[1][0].prompt is None
    assert answers[1][0].prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_the_prefix_cache_can_be_looked_into_and_reset(llm: LLM) -> None:
    text = "The lighthouse at the end of the pier had been dark for a year when we came, and " * 3
    for _ in range(2):
        output = llm.generate(text, GREEDY, cache_salt="mine", retention=Retention(90))[0]
    report = llm.inspect_prefix_cache()
    own = next(part for part in report.namespaces if part.salt)
    assert own.hits == 1
    assert output.cached_tokens in {hot.tokens for hot in report.hottest}
    assert "mine" not in repr(report)
    llm.reset_prefix_cache()
    assert llm.inspect_prefix_cache().namespaces == []


def test_the_text_is_the_decoded_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
    output = llm.generate("日本語で: ", params)[0].outputs[0]
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    stream = llm.stream("Count: one, two", endless)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    done = threading.Event()
    for _ in range(200):
        llm._thread.call(lambda core: done.set() if not core.has_work else None)
        if done.wait(0.05):
            return
    raise AssertionError("the request goes on after its caller has left")


def test_a_stream_that_never_begins_runs_nothing_and_refuses_at_once(llm: LLM) -> None:
    llm.stream("Count: one, two", GREEDY).close()  # type: ignore[attr-defined]
    assert not llm._core.has_work
    with pytest.raises(RequestError, match="no tokens"):
        llm.stream([], GREEDY)


def test_progress_counts_requests(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate(["a", "b", "c"], GREEDY, progress=lambda done, all_: seen.append((done, all_)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_several_threads_share_the_engine(llm: LLM) -> None:
    expected = llm.generate("The sea is", GREEDY)[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate("The sea is", GREEDY)[0].text))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 8


def test_one_bad_prompt_refuses_the_call_before_anything_starts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 99999"):
        llm.generate([[1, 2], [99999]], GREEDY)
    with pytest.raises(ParameterError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="'x'"):
        llm.generate([[1, "x"]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(TemplateError, match="empty"):
        llm.chat([], GREEDY)


def test_an_unknown_option_or_model_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="'max_num_seqs'"):
        LLM("no such model", max_num_sqs=3)
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        LLM("smollm-135m")


def test_a_closed_engine_says_so(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, kv_cache_bytes=8 << 20)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("Hello", GREEDY)


def test_one_that_is_never_closed_ends_with_its_last_reference_or_the_program(
    smollm2_path: Path,
) -> None:
    llm = LLM(smollm2_path, kv_cache_bytes=8 << 20)
    thread = llm._thread
    del llm
    assert not thread.alive
    program = (
        "import sys; from trimaran import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], kv_cache_bytes=8 << 20)\n"
        "next(llm.stream('Hello', SamplingParams(max_tokens=None, ignore_eos=True)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, smollm2_path], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_makes_its_own(llm: LLM, smollm2_path: Path) -> None:
    answer = llm.chat(QUESTION, GREEDY)[0].text

    def in_child() -> str:
        with pytest.raises(EngineClosedError, match=f"process {os.getppid()}.*make an engine"):
            llm.chat(QUESTION, GREEDY)
        llm.close()
        with LLM(smollm2_path, kv_cache_bytes=64 << 20) as own:
            return str(own.chat(QUESTION, GREEDY)[0].text == answer)

    assert in_fork(in_child) == "True"
    assert llm.chat(QUESTION, GREEDY)[0].text == answer


def test_started_requests_share_steps_whoever_reads_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    before = llm._core.metrics.steps
    streams = [llm.start(f"{number} ships", params, priority=number) for number in range(8)]
    texts = ["".join(delta.text for delta in stream) for stream in reversed(streams)]
    assert llm._core.metrics.steps - before < 2 * 20, "they were computed one after the other"
    alone = llm.generate([f"{number} ships" for number in range(8)], params)
    assert texts[::-1] == [output.text for output in alone]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_started_request_that_is_let_go_of_is_aborted(llm: LLM, how: str) -> None:
    stream = llm.start("Once", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    del stream
    llm.generate("Twice", SamplingParams(max_tokens=1))
    assert not llm._core._live
