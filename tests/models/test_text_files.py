"""Tokenizer and chat template, taken out of a checkpoint and put together again."""

from __future__ import annotations

from pathlib import Path

from support.builds import write_native_folder
from support.hard_strings import HARD_STRINGS

from trimaran.models.load import load_checkpoint
from trimaran.models.text_files import GGUF_METADATA, NAMES, read_text_files, text_files


def test_those_of_a_gguf_file(smollm2_path: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(smollm2_path)
    files = text_files(checkpoint)
    assert files.keys() == {GGUF_METADATA}
    (tmp_path / GGUF_METADATA).write_bytes(files[GGUF_METADATA])
    tokenizer, template = read_text_files(tmp_path, files)
    own = checkpoint.tokenizer()
    for text in HARD_STRINGS:
        assert tokenizer.encode(text) == own.encode(text)
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (own.vocab_size, own.special_ids)
    messages = [{"role": "user", "content": "Hello"}]
    expected = checkpoint.chat_template()
    assert template is not None and expected is not None
    assert template.render(messages) == expected.render(messages)


def test_those_of_a_folder(tmp_path: Path) -> None:
    source = write_native_folder(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    files = text_files(load_checkpoint(source))
    assert set(files) < set(NAMES)
    for name, content in files.items():
        (tmp_path / "copy" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "copy" / name).write_bytes(content)
    tokenizer, template = read_text_files(tmp_path / "copy", files)
    assert tokenizer.encode("abc") == load_checkpoint(source).tokenizer().encode("abc")
    assert template is not None
    assert (template.source, template.tool_source) == ("<{{ messages[0].content }}>", "tools")
