"""What the KV of a prefix depends on beside its tokens, or is kept apart by."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Namespace(NamedTuple):
    """Prefixes are shared only within one.

    Attributes:
        salt: a tenant's; "" is shared by all who give none.
        adapter: name of the weights laid over the model's; "" is the model alone.
    """

    salt: str = ""
    adapter: str = ""

    def digest(self) -> bytes:
        """16 bytes by which it can be named without being told: BLAKE2b of both parts.

        Who knows a salt recognises it, and a salt that is easy to guess can be guessed.
        """
        salt, adapter = (part.encode("utf-8", "surrogatepass") for part in self)
        parts = len(salt).to_bytes(8, "little") + salt + adapter
        return hashlib.blake2b(parts, digest_size=16).digest()
