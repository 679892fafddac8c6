"""`block_size="auto"`: chosen from measured lengths, which are kept from engine to engine."""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import write_tiny_model

from trimaran import LLM, EngineConfig, SamplingParams
from trimaran.engine.block_size import MOST_WASTE, choose_block_size, waste
from trimaran.engine.lengths import LengthRecord, Lengths


def counted(*lengths: int) -> Lengths:
    found = Lengths()
    for length in lengths:
        found.add(length)
    return found


@pytest.mark.parametrize(
    ("length", "size"), [(20, 4), (60, 4), (130, 8), (300, 16), (600, 32), (4000, 32)]
)
def test_the_largest_size_that_wastes_little(length: int, size: int) -> None:
    chosen = choose_block_size(counted(*[length] * 40))
    assert chosen.tokens == size
    assert f"{length} tokens" in chosen.reason


def test_few_sequences_are_not_believed_and_windows_count() -> None:
    assert choose_block_size(counted(*[4000] * 5)).tokens == 16
    long = counted(*[4000] * 50)
    assert choose_block_size(long, window=200).tokens == 8
    assert "a window sees 200" in choose_block_size(long, window=200).reason


@given(st.lists(st.integers(1, 5000), min_size=32, max_size=80))
def test_waste_is_what_sequences_of_these_lengths_leave_empty(lengths: list[int]) -> None:
    found = counted(*lengths)
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))
    low, high = min(lengths), max(lengths)
    assert low - low / 8 <= found.quantile(0.5) <= high
    chosen = choose_block_size(found)
    mean = found.mean
    assert chosen.tokens == 4 or waste(chosen.tokens, mean) <= MOST_WASTE
    assert chosen.tokens == 32 or waste(2 * chosen.tokens, mean) > MOST_WASTE


def test_unsound_records_count_as_empty(tmp_path: Path) -> None:
    record = LengthRecord(tmp_path / "model", tmp_path)
    assert record.read().count == 0
    (path,) = [record._path]
    for text in ("", "[]", "{}", '{"count": 5, "tokens": 1, "bins": {}}', '{"count": "x"}'):
        path.write_text(text)
        assert record.read().count == 0
    record.add(counted(7))
    assert record.read().tokens == 7
    assert json.loads(path.read_text())["bins"] == {"7": 1.0}


def _add(folder: Path) -> None:
    record = LengthRecord(folder / "model", folder)
    for _ in range(20):
        record.add(counted(100))


def test_engines_that_end_together_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add, args=(tmp_path,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert LengthRecord(tmp_path / "model", tmp_path).read().count == 80


def test_old_lengths_give_way(tmp_path: Path) -> None:
    known = counted(*[10] * 4096)
    known.join(counted(*[1000] * 4096))
    known.join(counted(*[1000] * 4096))
    assert known.count < 4097
    assert known.quantile(0.5) == 960  # 1000, rounded down to an eighth


def test_an_engine_learns_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = write_tiny_model(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def run() -> tuple[int, list[str]]:
        with (
            caplog.at_level(logging.INFO, "trimaran"),
            LLM(model, backend="reference", block_size="auto") as llm,
        ):
            outputs = llm.generate([[1, 2, 3]] * 40, params)
            size = llm._core.scheduler.kv.block_size
        return size, [output.text for output in outputs]

    first, texts = run()
    assert first == 16
    second, again = run()
    assert second == 4, "sequences of seven tokens want small blocks"
    assert texts == again
    assert "block size 4: 40 sequences had 7 tokens" in caplog.text


def test_auto_is_an_option() -> None:
    assert EngineConfig(block_size="auto").block_size == 0  # type: ignore[arg-type]
    assert EngineConfig(preset="trtllm", block_size="auto").block_size == 0  # type: ignore[arg-type]
