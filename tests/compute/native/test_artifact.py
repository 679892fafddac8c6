"""Builds: read back to the bit, or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builds import SoundBuild, build_file, load_build, read_header, signed
from support.plans import Line, step
from support.quantized import BLOCK_TYPES, quantized_model
from support.tiny import tiny_model
from support.tiny_windows import window_folder

from trimaran.compute.native import artifact
from trimaran.compute.native.artifact import Build, write_build
from trimaran.compute.native.backend import NativeBackend, available_isas
from trimaran.compute.native.built import BuiltModel, build
from trimaran.core.config import WEIGHTS
from trimaran.core.errors import BackendError, BuildError, CapacityError, TrimaranError
from trimaran.core.step_plan import Float32
from trimaran.models.load import load_checkpoint
from trimaran.models.rope import Llama3Scaling, RopeSpec
from trimaran.models.source import Source
from trimaran.models.text_files import GGUF_METADATA, NAMES

TOKENS = np.random.default_rng(7).integers(0, 256, 40).tolist()
SOURCE = Source("tiny.gguf", "0" * 64, 1234)
TEXT = {GGUF_METADATA: b"some text"}
FUNCTION_FIXTURES = [HealthCheck.function_scoped_fixture]


def logits_of(model: Any, tokens: list[int] = TOKENS) -> Float32:
    backend = NativeBackend(model, threads=2, max_rows=64)
    backend.allocate_cache(4, 16)
    line = Line(tokens, [0, 1, 2])
    step(backend, [(line, len(tokens))], 16)
    backend.close()
    return np.array(line.logits)


@pytest.fixture(scope="module")
def built() -> BuiltModel:
    return build(quantized_model("Q4_1"), "as-is", "auto")


@pytest.fixture(scope="module")
def sound(built: BuiltModel, tmp_path_factory: pytest.TempPathFactory) -> SoundBuild:
    folder = tmp_path_factory.mktemp("build")
    write_build(folder, built, SOURCE, TEXT)
    return SoundBuild(build_file(folder).read_bytes())


@pytest.fixture
def folder(sound: SoundBuild, tmp_path: Path) -> Path:
    build_file(tmp_path).write_bytes(sound.content)
    for name, text in TEXT.items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def changed(folder: Path, sound: SoundBuild, change: Callable[[dict[str, Any]], object]) -> Path:
    build_file(folder).write_bytes(signed(sound.content, change))
    return folder


# ---------------------------------------------------------------------- round trip


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_gives_the_same_bits(tmp_path: Path, isa: str, weights: str) -> None:
    own = build(quantized_model("Q4_1"), weights, isa)
    write_build(tmp_path, own, SOURCE, TEXT)
    read = load_build(tmp_path)
    assert (read.isa, read.weights, read.nbytes) == (isa, weights, own.nbytes)
    np.testing.assert_array_equal(logits_of(read), logits_of(own))


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_every_block_type_gives_the_same_bits(tmp_path: Path, type_name: str) -> None:
    own = build(quantized_model(type_name), "as-is", "auto")
    write_build(tmp_path, own, SOURCE, {})
    np.testing.assert_array_equal(logits_of(load_build(tmp_path)), logits_of(own))


def test_everything_about_the_model_is_kept(tmp_path: Path) -> None:
    rope = RopeSpec(16, 1e4, 2.0, Llama3Scaling(8.0, 1.0, 4.0, 64), tuple(np.arange(1.0, 9.0)))
    model = tiny_model(bos_token_id=256, eos_token_ids=(257, 258), rope=rope)
    write_build(tmp_path, build(model, "bf16", "auto"), SOURCE, TEXT)
    read = Build.open(tmp_path, NAMES)
    assert read.config == model.config
    assert (read.source, read.text_files) == (SOURCE, (GGUF_METADATA,))
    assert Build.open(build_file(tmp_path), NAMES) == read


def test_windows_are_kept(tmp_path: Path) -> None:
    folder = window_folder(tmp_path / "m", "Gemma3ForCausalLM")
    own = build(load_checkpoint(folder).model, "as-is", "auto")
    write_build(tmp_path / "b", own, SOURCE, TEXT)
    read = load_build(tmp_path / "b")
    assert read.config == own.config and read.config.windows
    tokens = [token % 40 for token in TOKENS]
    np.testing.assert_array_equal(logits_of(read, tokens), logits_of(own, tokens))


@pytest.mark.parametrize("windows", [[6], [6, 6, 6, 6, 6, 0, -1], [6, 6, 6, 6, 6, 0, "6"], 6])
def test_windows_that_cannot_be_are_refused(tmp_path: Path, windows: object) -> None:
    folder = window_folder(tmp_path / "m", "Gemma3ForCausalLM")
    built = tmp_path / "b"
    write_build(built, build(load_checkpoint(folder).model, "as-is", "auto"), SOURCE, TEXT)
    content = build_file(built).read_bytes()
    change = signed(content, lambda header: header["model"].update(windows=windows))
    build_file(built).write_bytes(change)
    with pytest.raises(BuildError):
        load_build(built)


def test_weights_stay_when_the_file_goes(folder: Path, built: BuiltModel) -> None:
    read = load_build(folder)
    build_file(folder).write_bytes(bytes(1000))
    np.testing.assert_array_equal(logits_of(read), logits_of(built))


# ---------------------------------------------------------------------- accidents


@settings(max_examples=150, suppress_health_check=FUNCTION_FIXTURES)
@given(data=st.data())
def test_a_changed_byte_is_found(folder: Path, sound: SoundBuild, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(sound.content) - 1) | st.integers(0, 63))
    flipped = bytearray(sound.content)
    flipped[place] ^= data.draw(st.integers(1, 255))
    build_file(folder).write_bytes(flipped)
    with pytest.raises(BuildError, match=str(folder)):
        load_build(folder)


@settings(max_examples=100, suppress_health_check=FUNCTION_FIXTURES)
@given(data=st.data())
def test_a_truncated_file_is_found(folder: Path, sound: SoundBuild, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(sound.content) - 1) | st.integers(0, 64))
    build_file(folder).write_bytes(sound.content[:size])
    with pytest.raises(BuildError, match=f"truncated: it has {size}"):
        load_build(folder)


def test_a_longer_file_is_found(folder: Path, sound: SoundBuild) -> None:
    build_file(folder).write_bytes(sound.content + b"\0")
    with pytest.raises(BuildError, match="corrupt"):
        load_build(folder)


def test_files_of_text_are_those_that_were_written(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(BuildError, match="chat_template.jinja isn't what was built"):
        load_build(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / GGUF_METADATA).write_bytes(b"some texT")
    with pytest.raises(BuildError, match=f"{GGUF_METADATA} isn't what was built"):
        load_build(folder)
    (folder / GGUF_METADATA).unlink()
    with pytest.raises(BuildError, match=f"lacks {GGUF_METADATA}"):
        load_build(folder)


# ---------------------------------------------------------------------- for others


def test_a_build_of_other_sources_is_stale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "maker", lambda: "0" * 64)
    with pytest.raises(BuildError, match="is stale: .* build the model again"):
        load_build(folder)


def test_options_that_it_was_not_built_with(folder: Path, built: BuiltModel) -> None:
    read = Build.open(folder, NAMES)
    read.check_options("as-is", "auto")
    read.check_options("as-is", built.isa)
    with pytest.raises(BuildError, match="weights is 'int8', but .* was built with 'as-is'"):
        read.check_options("int8", "auto")
    other = next(isa for isa in ("avx2", "portable") if isa != built.isa)
    with pytest.raises(BackendError, match=f"isa is '{other}', but .* for '{built.isa}'"):
        read.check_options("as-is", other)


def test_an_instruction_set_that_the_machine_lacks(folder: Path, sound: SoundBuild) -> None:
    changed(folder, sound, lambda header: header.update(isa="sse9"))
    with pytest.raises(BackendError, match="was built for 'sse9'.* build the model again here"):
        Build.open(folder, NAMES).check_options("as-is", "auto")


def test_weights_of_another_instruction_set_never_run(folder: Path, sound: SoundBuild) -> None:
    codes = {"amx": 0}.get(available_isas()[-1], 3)  # those of the other kind of kernels

    def swap(header: dict[str, Any]) -> None:
        header["matrices"][-1][2]["codes"] = codes

    changed(folder, sound, swap)
    with pytest.raises(TrimaranError):
        NativeBackend(load_build(folder), threads=1)


# ---------------------------------------------------------------------- ill will


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("model"), "model"),
        (lambda h: h["model"].update(num_layers=0), "num_layers is 0"),
        (lambda h: h["model"].pop("rope"), "rope"),
        (lambda h: h["text_files"].update({"../escape": "0"}), "escape"),
        (lambda h: h["checksums"].pop(), "checksum for each piece"),
        (lambda h: h["checksums"].__setitem__(0, "x"), "a checksum is no number"),
        (lambda h: h.update(kv="fp8"), "kv is .fp8."),
        (lambda h: h.pop("kv"), "unsound"),
        (lambda h: h["matrices"].pop(), "unsound"),
        (lambda h: h["matrices"][0][2].update(outputs=1 << 20), "data end outside"),
        (lambda h: h["matrices"][0][2].update(outputs=-1), "outputs out of range"),
        (lambda h: h["matrices"][0][2].update(codes=9), "unknown kind"),
        (lambda h: h["matrices"][0][2].update(block_bytes=65), "multiple of 64"),
        (lambda h: h["matrices"][0][2].update(scales_at=1 << 40), "outside the block"),
        (lambda h: h["vectors"].append(64), "outside the data"),
        (lambda h: h["plan"].append(["__init__", []]), "no call"),
        (lambda h: h["plan"].append(["buffer", [{"vector": -1}]]), "no argument"),
        (lambda h: h["plan"].insert(0, ["buffer", [1 << 40, False]]), "unsound"),
        (lambda h: h["plan"].pop(0), "unsound"),
        (lambda h: h.update(plan="linear"), "no call"),
    ],
)
def test_an_unsound_header_is_refused(
    folder: Path, sound: SoundBuild, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        load_build(changed(folder, sound, change))


def numbers_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value there are numbers."""
    if isinstance(value, dict):
        return [found for key in value for found in numbers_of(value[key], (*path, key))]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in numbers_of(item, (*path, i))]
    return [path] if isinstance(value, int | float) else []


@settings(max_examples=200, deadline=None, suppress_health_check=FUNCTION_FIXTURES)
@given(data=st.data())
def test_any_number_in_a_header_is_safe_to_run(
    folder: Path, sound: SoundBuild, data: st.DataObject
) -> None:
    """Another plan or layout than what was built gives wrong numbers or an error, never a
    read outside of memory."""
    header = read_header(sound.content)
    places = numbers_of(header["plan"], ("plan",)) + numbers_of(header["matrices"], ("matrices",))
    values = st.integers(-2, 70) | st.sampled_from([1 << 31, 1 << 62, 0.5, True])
    new = copy.deepcopy(header)
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2)):
        at = new
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = data.draw(values)
    changed(folder, sound, lambda own: own.update(new))
    with contextlib.suppress(BuildError, BackendError, CapacityError):
        logits_of(load_build(folder))
