"""Passwords never reach a message or a log: what is secret, and how it is hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
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


#: Every secret that a client of this process was made with.
_known: set[str] = set()


def remember(kafka: Mapping[str, Any]) -> None:
    """From now on `concealed` hides the secrets among these properties."""
    _known.update(_secrets(kafka))


def remember_values(hidden: Iterable[str]) -> None:
    """From now on `concealed` hides these too: passwords of systems other than Kafka."""
    _known.update(each for each in hidden if each)


def concealed(text: str) -> str:
    """``text`` without any secret that this process knows."""
    return _without(text, _known)


def redact(text: str, kafka: Mapping[str, Any]) -> str:
    """``text`` without any secret of ``kafka``, in whatever way it was quoted."""
    return _without(text, _secrets(kafka))


def _secrets(kafka: Mapping[str, Any]) -> set[str]:
    found = {str(value) for name, value in kafka.items() if is_secret(name) and str(value)}
    # librdkafka shows the rest of the line, from the word that it does not understand
    line = str(kafka.get("sasl.oauthbearer.config", ""))
    return found | {line[at.start() :] for at in re.finditer(r"\S+", line)}


def _without(text: str, secrets: Iterable[str]) -> str:
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
