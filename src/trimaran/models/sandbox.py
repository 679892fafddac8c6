"""Runs the templates of strangers: Jinja, sandboxed, with bounds on what it may use.

Jinja's sandbox keeps a template from reaching out; it does not keep it from looping or
growing for ever. Here every turn of a loop and every call costs steps, and what operators, methods
and filters make is measured before it is made, where they could make much of little.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trimaran.core.errors import TemplateError

MAX_STEPS = 2_000_000
"""Of one rendering: some seconds, and thousands of messages. A turn of a loop takes one step,
a call ten."""

_CALL_STEPS = 10

MAX_LENGTH = 32 << 20
"""Characters of the output, and of any string or list made on the way."""

_steps: ContextVar[int] = ContextVar("steps")


class SandboxedTemplate:
    """A compiled template with the functions and filters that chat templates expect.

    Behaves as in transformers (`apply_chat_template`): whole lines of control are removed,
    `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue`,
    and `{% generation %}` blocks, whose contents are rendered in place.
    """

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        """
        Raises:
            TemplateError: not valid Jinja.
        """
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationExtension, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            raise TemplateError(
                f"the chat template can't be compiled: {type(error).__name__}: {error}"
            ) from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """
        Raises:
            TemplateError: the template refused, failed, or went beyond a limit.
        """
        token = _steps.set(MAX_STEPS)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_LENGTH:
                    raise _Refused(f"its output has more than {MAX_LENGTH} characters")
                parts.append(part)
        except _Raised as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from None
        except _Refused as error:
            raise TemplateError(f"the chat template was stopped: {error}") from None
        except Exception as error:  # anything that a program of strangers may do
            raise TemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error
        finally:
            _steps.reset(token)
        return "".join(parts)


class _Raised(Exception):
    """The template called `raise_exception`."""


class _Refused(Exception):
    """The template went beyond a limit."""


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _spend(steps: int = 1) -> None:
    left = _steps.get(MAX_STEPS) - steps
    if left < 0:
        raise _Refused(f"it takes more than {MAX_STEPS} steps")
    _steps.set(left)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """The same values, a step each."""
    for value in values:
        _spend()
        yield value


def _concatenated(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise _Refused(f"it makes a value of more than {MAX_LENGTH} characters or items")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with steps counted and lengths checked."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["_counted"] = _counted
        self.filters["_concatenated"] = _concatenated
        for name, grown in _GROWN_BY_FILTER.items():
            self.filters[name] = _measured(self.filters[name], grown)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(_CALL_STEPS)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and (grown := _GROWN.get(method.__name__)) is not None:
            _check_length(grown(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_length(len(left) + len(right))
        elif operator == "*":
            _check_length(_repeated(left, right))
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_length(_grown_by_format(left))
        return super().call_binop(context, operator, left, right)


def _repeated(left: Any, right: Any) -> int:
    """Length of `left * right`; 0 where it is a number."""
    if hasattr(left, "__len__") and isinstance(right, int):
        return int(len(left) * right)
    if hasattr(right, "__len__") and isinstance(left, int):
        return int(len(right) * left)
    return 0


def _grown_by_width(value: Any, width: Any = 80, *rest: Any, **options: Any) -> int:
    return int(width) if isinstance(width, int) else 0


def _grown_by_replace(text: Any, old: Any, new: Any = "", *rest: Any, **options: Any) -> int:
    whole = str(text)
    return len(whole) + whole.count(str(old)) * len(str(new))


def _grown_by_indent(text: Any, width: Any = 4, *rest: Any, **options: Any) -> int:
    lines = str(text).count("\n") + 1
    return lines * (int(width) if isinstance(width, int) else len(str(width)))


def _grown_by_format(text: Any, *args: Any, **options: Any) -> int:
    """The largest number in a format bounds its widths and precisions."""
    return sum(int(digits[:12]) for digits in re.findall("[0-9]+", str(text)))


def _grown_by_join(separator: Any, values: Any = (), *rest: Any, **options: Any) -> int:
    if not isinstance(values, list | tuple):
        return 0
    return sum(len(str(separator)) + len(value) for value in values if isinstance(value, str))


_Grown = Callable[..., int]

_GROWN: Mapping[str, _Grown] = {
    "center": _grown_by_width,
    "ljust": _grown_by_width,
    "rjust": _grown_by_width,
    "zfill": _grown_by_width,
    "expandtabs": _grown_by_width,
    "replace": _grown_by_replace,
    "format": _grown_by_format,
    "join": _grown_by_join,
}
"""By method of `str`: about how long its result can become."""

_GROWN_BY_FILTER: Mapping[str, _Grown] = {
    "batch": _grown_by_width,
    "center": _grown_by_width,
    "slice": _grown_by_width,
    "replace": _grown_by_replace,
    "indent": _grown_by_indent,
    "format": _grown_by_format,
    "join": lambda values, separator="", *rest, **options: _grown_by_join(separator, values),
}


def _measured(filter_: Callable[..., Any], grown: _Grown) -> Callable[..., Any]:
    """The filter, which refuses before it makes something too long."""
    # Filters that want the environment or the context get it as their first argument.
    surplus = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @functools.wraps(filter_)
    def measured(*args: Any, **kwargs: Any) -> Any:
        _check_length(grown(*args[surplus:], **kwargs))
        return filter_(*args, **kwargs)

    return measured


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_length(max(base.bit_length() * exponent, 0) // 8)


class _Bounded(NodeTransformer):
    """Rewrites loops to count their turns, and `~` to measure what it makes."""

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationExtension(Extension):
    """`{% generation %} … {% endgeneration %}`: marks what a model wrote, for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
