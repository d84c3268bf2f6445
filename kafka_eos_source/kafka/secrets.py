"""Passwords never reach a message or a log: what is secret, and how it is hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

MASK = "********"

#: Names of properties whose values are never shown: librdkafka's own list of sensitive ones, Java's, and
#: whatever else is called like a secret.
_SECRET = re.compile(
    r"passw|passphrase|secret|credential|jaas|\.pem$|ssl[._]key$|private\.?key|(^|[._])token$"
    r"|oauthbearer\.config$|keystore\.key$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether the value of the property may not be shown."""
    return _SECRET.search(name) is not None


def shown(name: str, value: str) -> str:
    """The value of a property, as a message may have it."""
    return MASK if is_secret(name) else value


def masked(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with every secret hidden, for messages and logs."""
    return {name: MASK if is_secret(name) else value for name, value in kafka.items()}


def redact(text: str, kafka: Mapping[str, Any]) -> str:
    """``text`` without any secret of ``kafka``, in whatever way it was quoted."""
    secrets = {str(value) for name, value in kafka.items() if is_secret(name) and str(value)}
    forms = {
        form
        for secret in secrets
        for form in (
            secret,
            repr(secret)[1:-1],
            json.dumps(secret)[1:-1],
            quote(secret),
            quote(secret, safe=""),
        )
    }
    for form in sorted(forms, key=len, reverse=True):  # one may be part of another
        text = text.replace(form, MASK)
    return text
