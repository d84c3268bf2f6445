"""Keeps passwords out of messages and logs: recognises secret properties and hides their values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "********"

#: Names of properties whose values are never shown: those that librdkafka and Java's clients treat as
#: sensitive, and any other name that suggests a secret.
_SECRET = re.compile(
    r"passw|passphrase|secret|credential|jaas|\.pem$|ssl[._]key$|private\.?key|(^|[._])token$"
    r"|oauthbearer\.config$|keystore\.key$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Returns whether the value of a property must be hidden."""
    return _SECRET.search(name) is not None


def shown(name: str, value: str) -> str:
    """Returns the value of a property, or `MASK` if it is secret."""
    return MASK if is_secret(name) else value


def masked(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties with every secret value replaced by `MASK`."""
    return {name: MASK if is_secret(name) else value for name, value in kafka.items()}


#: Every secret that this process has passed to a client.
_registered: set[str] = set()


def register_secrets(kafka: Mapping[str, Any]) -> None:
    """Makes `concealed` hide the secret values among these properties."""
    _registered.update(_secrets(kafka))


def register_secret_values(secrets: Iterable[str]) -> None:
    """Makes `concealed` hide these values too, such as passwords of sinks."""
    _registered.update(each for each in secrets if each)


def concealed(text: str) -> str:
    """Returns ``text`` with every registered secret replaced by `MASK`."""
    return _without(text, _registered)


def redact(text: str, kafka: Mapping[str, Any]) -> str:
    """Returns ``text`` with every secret of ``kafka`` replaced by `MASK`, in any form of quoting."""
    return _without(text, _secrets(kafka))


def _secrets(kafka: Mapping[str, Any]) -> set[str]:
    found = {str(value) for name, value in kafka.items() if is_secret(name) and str(value)}
    # librdkafka's error quotes the rest of this line, starting with the word that it cannot parse
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
    for form in sorted(forms, key=len, reverse=True):  # longest first: one secret may contain another
        text = text.replace(form, MASK)
    return text
