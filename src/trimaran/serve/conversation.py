"""The conversation of a `/v1/realtime` session: its items, in their order."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from trimaran.serve.errors import ApiError

MAX_ITEMS = 4096


def new_id(kind: str) -> str:
    """A name that no other thing has, as "item_…"."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class ConversationItem:
    """A message. `status` is "in_progress" while it is generated, then "completed", or
    "incomplete" where it was cut off."""

    role: str
    text: str
    id: str = field(default_factory=lambda: new_id("item"))
    status: str = "completed"

    def shown(self) -> dict[str, Any]:
        """As OpenAI's API shows it."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        content = [{"type": kind, "text": self.text}]
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": [] if self.status == "in_progress" else content,
        }


class Conversation:
    """Items in their order, of bounded number and size."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._items: list[ConversationItem] = []
        self.id = new_id("conv")

    def __len__(self) -> int:
        return len(self._items)

    def messages(self, instructions: str | None) -> list[dict[str, str]]:
        """As a chat template takes them, the instructions first."""
        found = [{"role": "system", "content": instructions}] if instructions else []
        return found + [{"role": item.role, "content": item.text} for item in self._items]

    def add(self, item: ConversationItem, after: str | None = None) -> str | None:
        """Takes an item in, at the end or after another one ("root": as the first).

        Returns:
            The id of the one before it.

        Raises:
            ApiError: there are too many, one has its id, or the one named isn't there.
        """
        if len(self._items) >= MAX_ITEMS:
            raise ApiError(
                400,
                f"the conversation has {MAX_ITEMS} items, the most it may have; delete some",
                param="item",
                code="conversation_too_long",
            )
        self.check_room(len(item.text), "item")
        if any(each.id == item.id for each in self._items):
            raise ApiError(
                400,
                f"the conversation has an item '{item.id}' already; give another id",
                param="item.id",
                code="item_exists",
            )
        at = len(self._items)
        if after == "root":
            at = 0
        elif after is not None:
            at = self._at(after, "previous_item_id") + 1
        self._items.insert(at, item)
        return self._items[at - 1].id if at else None

    def check_room(self, characters: int, param: str) -> None:
        """Raises `ApiError` where so much more text would be too much."""
        held = sum(len(item.text) for item in self._items)
        if held + characters > self._max_characters:
            raise ApiError(
                400,
                f"the conversation would have {held + characters} characters, above this server's"
                f" limit of {self._max_characters}; delete some items",
                param=param,
                code="conversation_too_long",
            )

    def get(self, item_id: str) -> ConversationItem:
        """Raises `ApiError` where there is no such item."""
        return self._items[self._at(item_id, "item_id")]

    def delete(self, item_id: str) -> None:
        """Raises `ApiError` where there is no such item."""
        del self._items[self._at(item_id, "item_id")]

    def _at(self, item_id: str, param: str) -> int:
        for i, item in enumerate(self._items):
            if item.id == item_id:
                return i
        raise ApiError(
            400,
            f"the conversation has no item '{item_id}'",
            param=param,
            code="item_not_found",
        )
