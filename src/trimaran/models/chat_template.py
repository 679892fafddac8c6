"""Chat templates: from messages to the one text that a model was trained on.

Templates are programs in Jinja that come with a model, so they run in a sandbox: no
attributes that lead out of it, and bounded steps, strings and output (`sandbox.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.core.errors import CheckpointError, TemplateError
from trimaran.models.tokenizer_config import TokenizerConfig

if TYPE_CHECKING:
    from trimaran.models.sandbox import SandboxedTemplate

MAX_SOURCE = 1 << 20
"""Characters of a template; real ones have some thousand."""

_DEFAULT, _TOOL_USE = "default", "tool_use"


class ChatTemplate:
    """A model's chat template. Compiled at the first use; threads may share it."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """
        Args:
            source: Jinja.
            bos_token, eos_token: their texts, which templates use by these names.
            tool_source: the template for conversations with tools, where there is a second.
            now: the time that templates ask for with `strftime_now`.

        Raises:
            TemplateError: longer than any template.
        """
        for text in (source, tool_source or ""):
            if len(text) > MAX_SOURCE:
                raise TemplateError(
                    f"the chat template has {len(text)} characters, above the limit of"
                    f" {MAX_SOURCE}; give another model, or generate from a prompt"
                )
        self.source = source
        self.tool_source = tool_source
        self._bos_token = bos_token or ""
        self._eos_token = eos_token or ""
        self._now = now

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> ChatTemplate | None:
        """The template in a GGUF file's metadata; None where it has none.

        Raises:
            TemplateError: it isn't text.
        """
        key = "tokenizer.chat_template"
        named = {
            name: metadata[name_key]
            for name, name_key in ((_DEFAULT, key), (_TOOL_USE, f"{key}.{_TOOL_USE}"))
            if metadata.get(name_key) is not None
        }
        return cls._from_named(
            named, key, _gguf_token(metadata, "bos"), _gguf_token(metadata, "eos")
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a Hugging Face folder; None where it has none.

        chat_template.jinja comes before the chat_template of tokenizer_config.json, as in
        transformers.

        Raises:
            TemplateError: it can't be read.
            CheckpointError: tokenizer_config.json is unsound.
        """
        folder = Path(folder)
        config = TokenizerConfig.read(folder)
        named = _config_templates(config)
        files = {
            _DEFAULT: folder / "chat_template.jinja",
            _TOOL_USE: folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja",
        }
        for name, path in files.items():
            if path.exists():
                named[name] = _read(path)
        return cls._from_named(
            named, str(folder), config.token("bos_token"), config.token("eos_token")
        )

    @classmethod
    def _from_named(
        cls, named: Mapping[str, object], where: str, bos: str | None, eos: str | None
    ) -> ChatTemplate | None:
        for name, source in named.items():
            if not isinstance(source, str):
                raise TemplateError(
                    f"{where}: the chat template '{name}' is a {type(source).__name__}, not text"
                )
        default, tool_use = named.get(_DEFAULT), named.get(_TOOL_USE)
        if not isinstance(default, str):
            return None
        return cls(default, bos, eos, tool_source=tool_use if isinstance(tool_use, str) else None)

    def check(self) -> None:
        """Compiles now what `render` would compile later.

        Raises:
            TemplateError: a template is not valid Jinja; names the line.
        """
        _ = self._compiled, self._compiled_for_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The text for a conversation.

        Args:
            messages: each with "role" (text) and "content" (text, or a list of text parts as
                {"type": "text", "text": …}); an answer with "tool_calls" may have no content.
                Further fields are handed to the template as they are.
            add_generation_prompt: end with the beginning of the model's answer.
            **extra: further variables of the template, such as `tools`.

        Raises:
            TemplateError: the messages are unsound, or the template is invalid, refused them
                (with its own words) or went beyond its limits.
        """
        tools = extra.get("tools")
        compiled = self._compiled_for_tools if tools else self._compiled
        variables = {
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            "tools": None,
            "documents": None,
            **extra,
            "messages": _checked(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return compiled.render(variables)

    @functools.cached_property
    def _compiled(self) -> SandboxedTemplate:
        from trimaran.models.sandbox import SandboxedTemplate

        return SandboxedTemplate(self.source, self._now)

    @functools.cached_property
    def _compiled_for_tools(self) -> SandboxedTemplate:
        from trimaran.models.sandbox import SandboxedTemplate

        if self.tool_source is None:
            return self._compiled
        return SandboxedTemplate(self.tool_source, self._now)


def _gguf_token(metadata: Mapping[str, object], name: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(number, int) or not isinstance(tokens, list):
        return None
    return str(tokens[number]) if 0 <= number < len(tokens) else None


def _config_templates(config: TokenizerConfig) -> dict[str, object]:
    """By name: `chat_template` is one text, or a list of {"name": …, "template": …}."""
    value = config.values.get("chat_template")
    if value is None:
        return {}
    if not isinstance(value, list):
        return {_DEFAULT: value}
    named: dict[str, object] = {}
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise TemplateError(
                f"{config.folder}: chat_template of tokenizer_config.json is a list with"
                f" {item!r}; its items must have a name and a template"
            )
        named[item["name"]] = item.get("template")
    if _DEFAULT not in named:
        raise TemplateError(
            f"{config.folder}: chat_template of tokenizer_config.json has no template named"
            f" '{_DEFAULT}', only {', '.join(sorted(named)) or 'none at all'}"
        )
    return named


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(4 * MAX_SOURCE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their contents as text."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(
            f'messages is a {type(messages).__name__}; give a list of {{"role": …, "content": …}}'
        )
    if not messages:
        raise TemplateError("messages is empty; give at least one")
    return [_checked_message(message, i) for i, message in enumerate(messages)]


def _checked_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(
            f'messages[{index}] is a {type(message).__name__}; give {{"role": …, "content": …}}'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(
            f"messages[{index}] has role {role!r}; give 'system', 'user', 'assistant' or another"
            " that the model's template knows"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    return {**message, "content": _text(content, index)}


def _text(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    where = f"the content of messages[{index}]"
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        what = "missing" if content is None else f"a {type(content).__name__}"
        raise TemplateError(f"{where} is {what}; give text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise TemplateError(f"{where} has a part of type {kind!r}; only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"{where} has a text part without 'text'")
        texts.append(part["text"])
    return "".join(texts)
