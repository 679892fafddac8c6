"""What a chat template puts around the last message, so that the message can still grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.core.errors import TemplateError
from trimaran.models.chat_template import ChatTemplate

_MARKS = ("\ue000typed\ue001", "\ue002Typed text.\ue003")
"""Two texts that stand for the message; from the private use area, so no template has them."""


class ChatFrame:
    """A conversation whose last message arrives piece by piece.

    A template is a program: it may trim the message, or look into it. So two messages are
    rendered to see what it does, and in the end the whole one, which is what counts.

    Attributes:
        head: what comes before the message.
        tail: what comes after it.
        trims: the template leaves out white space around the message.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            messages: the conversation; the content of the last one is what has been written
                of it so far, perhaps nothing.

        Raises:
            TemplateError: it refused the messages, or doesn't show the last one as it is.
        """
        if not messages:
            raise TemplateError("the conversation is empty; give at least one message")
        self._template = template
        self._messages = list(messages)
        self.head, self.tail = self._around(_MARKS[0])
        other = self._around(_MARKS[1])
        spaced = self.render(f" \n{_MARKS[0]}\n ")
        self.trims = spaced == self.head + _MARKS[0] + self.tail
        if other != (self.head, self.tail) or not (
            self.trims or spaced == f"{self.head} \n{_MARKS[0]}\n {self.tail}"
        ):
            raise TemplateError(
                "the chat template rewrites the last message, so it can't be sent in pieces;"
                " send the conversation when it is complete"
            )

    def render(self, content: str) -> str:
        """The text of the conversation with this as the last message."""
        last = {**self._messages[-1], "content": content}
        return self._template.render([*self._messages[:-1], last], add_generation_prompt=True)

    def _around(self, content: str) -> tuple[str, str]:
        text = self.render(content)
        head, mark, tail = text.partition(content)
        if not mark or content in tail:
            raise TemplateError(
                "the chat template doesn't show the last message exactly once, so it can't be"
                " sent in pieces; send the conversation when it is complete"
            )
        return head, tail
