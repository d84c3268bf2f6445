"""A token provider of a user, for brokers that accept tokens without a signature."""

from __future__ import annotations

import base64
import json
import time


def provide(config: str) -> tuple[str, float]:
    """Returns a token for the principal and the lifetime in the text, as in ``admin 600``."""
    principal, seconds = config.split()
    expires = time.time() + float(seconds)
    return (
        f"{_part({'alg': 'none'})}.{_part({'sub': principal, 'iat': time.time(), 'exp': expires})}.",
        expires,
    )


def refuse(config: str) -> None:
    """Raises, as a provider without an identity does."""
    raise ConnectionError("busy") if config == "later" else ValueError("no identity is assigned")


def _part(claims: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
