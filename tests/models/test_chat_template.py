"""Chat templates: what they write, what they refuse, and what they may not do."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest

from trimaran.core.errors import CheckpointError, TemplateError
from trimaran.models import sandbox
from trimaran.models.chat_template import MAX_SOURCE, ChatTemplate
from trimaran.models.gguf import GGUFFile

HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Ünï 🙂"},
    {"role": "assistant", "content": "Yes & no"},
    {"role": "user", "content": "Why?\n"},
]

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def render(source: str, messages: Any = HI, **extra: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **extra)


# ---------------------------------------------------------------------- real templates


def test_smollm2(smollm2_path: Path) -> None:
    template = ChatTemplate.from_gguf(GGUFFile.open(smollm2_path).metadata)
    assert template is not None
    template.check()
    assert template.render(TALK) == (
        "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\nÜnï 🙂<|im_end|>\n"
        "<|im_start|>assistant\nYes & no<|im_end|>\n<|im_start|>user\nWhy?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert template.render(HI, add_generation_prompt=False) == (
        f"{own}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


# ---------------------------------------------------------------------- the language


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{% endfor %}", "0True"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1, 2] %}{% continue %}x{% endfor %}", ""),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        (
            "{% set n = namespace(x=1) %}{% for i in [1] %}{% set n.x = 5 %}{% endfor %}{{ n.x }}",
            "5",
        ),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ [1] | tojson(separators=(',', ':')) }}", "[1]"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Nov 2026"),
        ("{{ '<&>' }}", "<&>"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        (
            "{{ 'a' ~ 1 ~ none ~ 'b' }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ '%s-%02d' % ('x', 3) }}",
            "a1Noneb323x-03",
        ),
    ],
)
def test_language(source: str, expected: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2026, 11, 29, 12))
    assert template.render(HI) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem.role if not loop.first }}"
        "{{ loop.nextitem is defined }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m.role) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% for x in nothing %}x{% else %}none{% endfor %}",
        "{% for x in 'abc' %}{% for y in [x, x] %}{{ y }}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% macro f(x, n=2) %}{{ x * n }}{{ caller() if caller }}{% endmacro %}{{ f('ab') }}",
        "{% macro f() %}[{{ caller(1) }}]{% endmacro %}{% call(x) f() %}{{ x + 1 }}{% endcall %}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ ','.join(['a', 'b']) }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ 'a-b-c'.split('-') | reverse | list }}{{ ' x '.strip() | upper | center(9) }}",
        "{{ 'aXbX' | replace('X', 'yy') }}{{ 'aXbX'.replace('X', 'yy', 1) }}{{ 'a\nb' | indent }}",
        "{{ 'n={:>4}'.format(7) }}{{ '%s' | format('z') }}{{ [1, 2, 3] | batch(2, 0) | list }}",
        "{{ messages[1:] | length }}{{ messages[-1]['content'] | trim }}{{ [1] + [2] }}",
        "{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}{% filter upper %}q{% endfilter %}",
    ],
)
def test_bounding_changes_nothing(source: str) -> None:
    """Equal to the plain sandbox with the settings of transformers."""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    assert render(source, TALK) == plain.from_string(source).render(messages=TALK)


def test_further_variables_are_handed_on() -> None:
    source = "{{ tools[0].name }}{{ enable_thinking }}"
    assert render(source, tools=[{"name": "f"}], enable_thinking=True) == "fTrue"


def test_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate("plain", tool_source="tools: {{ tools | length }}")
    assert template.render(HI) == template.render(HI, tools=[]) == "plain"
    assert template.render(HI, tools=[{}, {}]) == "tools: 2"


# ---------------------------------------------------------------------- messages


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
    assert render("{{ messages[0].content }}|", [{"role": "user", "content": parts}]) == "ab\n|"
    assert render("{{ messages[0].content }}|", [{"role": "user", "content": []}]) == "|"


def test_answers_with_tool_calls_need_no_content() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls, "extra": 1}]
    source = "{{ messages[0].content == '' }}{{ messages[0].tool_calls[0].function.name }}"
    assert render(source + "{{ messages[0].extra }}", messages) == "Truef1"


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render(CHATML, messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ("Hi", "messages is a str; give a list"),
        ({"role": "user", "content": ""}, "messages is a dict; give a list"),
        (None, "messages is a NoneType"),
        (["Hi"], r"messages\[0\] is a str"),
        ([*HI, {"content": "x"}], r"messages\[1\] has role None"),
        ([{"role": "", "content": "x"}], "has role ''"),
        ([{"role": "user"}], r"content of messages\[0\] is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "is missing"),
        ([{"role": "user", "content": 3}], "is a int; give text"),
        ([{"role": "user", "content": b"x"}], "is a bytes"),
        ([{"role": "user", "content": {"type": "text"}}], "is a dict"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; only 'text'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text part without 'text'"),
    ],
)
def test_unsound_messages_are_refused(messages: Any, match: str) -> None:
    with pytest.raises(TemplateError, match=match):
        render(CHATML, messages)


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refused the messages: Roles must alter"),
        ("{% if %}", "not valid Jinja: line 1"),
        ("a\nb\n{% for x in y %}", "not valid Jinja: line 3"),
        ("{% unknown %}", "not valid Jinja: line 1: Encountered unknown tag 'unknown'"),
        ("{% generation %}", "not valid Jinja"),
        ("{{ x | nosuchfilter }}", "not valid Jinja: line 1: No filter named 'nosuchfilter'"),
        ("{{ messages[0].missing.deeper }}", "failed on these messages: UndefinedError"),
        ("{{ 1 / 0 }}", "failed on these messages: ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "failed on these messages: TypeError"),
        ("{{ messages | tojson(indent=messages) }}", "failed on these messages: TypeError"),
        ("{{ strftime_now }}{{ [1][5].x }}", "UndefinedError"),
        ("{% include 'other' %}", "failed on these messages: TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "can't be compiled: RecursionError"),
    ],
)
def test_failures_are_told(source: str, match: str) -> None:
    with pytest.raises(TemplateError, match=match):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ render.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | attr('__class__')).x }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(TemplateError, match=r"SecurityError|UndefinedError|TypeError"):
        render(source)


BIG = "{% set a = 'x' * 5000000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{{ 'a' * 100000000 }}",
        "{{ 100000000 * [1] }}",
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 10 ** 1000000000 }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(width=1000000000) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ '{:1000000000}'.format(3) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ 'a\n' * 1000 | indent(1000000) }}",
        BIG + "{{ a.replace('x', a) }}",
        BIG + "{{ a | replace('x', a) }}",
        BIG + "{{ ''.join([a] * 1000) }}",
        BIG + "{{ [a] * 1000 | join }}",
        BIG + "{% for i in range(1000) %}{{ a }}{% endfor %}",
    ],
)
def test_templates_are_stopped(source: str) -> None:
    """Within seconds and without gigabytes."""
    start = time.perf_counter()
    with pytest.raises(TemplateError, match=r"was stopped: it|TypeError"):
        render(source)
    assert time.perf_counter() - start < 20


def test_ranges_are_limited() -> None:
    with pytest.raises(TemplateError, match="Range too big"):
        render("{{ range(10000000) | list }}")


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [{"role": "user", "content": "x" * 200}] * 20_000
    assert len(render(CHATML, messages)) > 20_000 * 200


def test_limits_are_per_rendering() -> None:
    turns = sandbox.MAX_STEPS * 2 // 3 // 1000
    source = (
        f"{{% for i in range({turns}) %}}{{% for j in range(999) %}}{{% endfor %}}{{% endfor %}}"
    )
    template = ChatTemplate(source)
    assert [template.render(HI) for _ in range(2)] == ["", ""]


def test_a_template_beyond_any_size_is_refused() -> None:
    with pytest.raises(TemplateError, match=f"{MAX_SOURCE + 1} characters, above the limit"):
        ChatTemplate("x" * (MAX_SOURCE + 1))


def test_threads_share_a_template() -> None:
    template = ChatTemplate(CHATML)
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(50):
            text = f"{number}-{i}"
            expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            if template.render([{"role": "user", "content": text}]) != expected:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------------- where it is from


def test_from_gguf() -> None:
    metadata: dict[str, object] = {
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert ChatTemplate.from_gguf(metadata) is None
    metadata["tokenizer.chat_template"] = "{{ bos_token }}x{{ eos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools{{ eos_token }}"
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None
    assert template.render(HI) == "<s>x</s>"
    assert template.render(HI, tools=[1]) == "tools</s>"
    del metadata["tokenizer.ggml.bos_token_id"]
    metadata["tokenizer.ggml.eos_token_id"] = 99
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None and template.render(HI) == "x"
    with pytest.raises(TemplateError, match="is a int, not text"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": 3})


def folder_template(folder: Path, **config: Any) -> ChatTemplate | None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.from_folder(folder)


def test_from_folder(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert folder_template(tmp_path) is None
    template = folder_template(tmp_path, chat_template="{{ bos_token }}one{{ eos_token }}")
    assert template is not None and template.render(HI) == "<s>one</s>"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    template = folder_template(tmp_path, chat_template=named)
    assert template is not None
    assert (template.render(HI), template.render(HI, tools=[1])) == ("two", "three")
    (tmp_path / "chat_template.jinja").write_text("four ü")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("five")
    template = folder_template(tmp_path, chat_template=named)
    assert template is not None
    assert (template.render(HI), template.render(HI, tools=[1])) == ("four ü", "five")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (3, "'default' is a int, not text"),
        ([3], "a list with 3"),
        ([{"name": "rag", "template": "x"}], "no template named 'default', only rag"),
        ([], "no template named 'default', only none at all"),
        ([{"name": "default"}], "'default' is a NoneType"),
    ],
)
def test_unsound_templates_of_a_folder(value: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=match):
        folder_template(tmp_path, chat_template=value)


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="chat_template.jinja can't be read"):
        ChatTemplate.from_folder(tmp_path)


def test_check_names_the_line() -> None:
    template = ChatTemplate("ok", tool_source="a\n{% if %}")
    assert template.render(HI) == "ok"
    with pytest.raises(TemplateError, match="line 2"):
        template.check()
