"""Hides the values of secret properties in the texts of libraries and servers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

from kafka_eos_source.secrets import MASK, is_secret, secrets_of_urls, shown

__all__ = ["MASK", "NO_SECRETS", "Secrets", "is_secret", "shown"]


@dataclass(frozen=True)
class Secrets:
    """The secrets of one client or query, which must not appear in the texts of other libraries.

    This package masks what it formats by the names of properties. The text of a library or server may quote a
    value anywhere, so it is searched for the values. Each object holds only the secrets of its own query:
    the password of one may be a usual word in the texts of another.

    Attributes:
        values: the secret values.
    """

    values: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> Secrets:
        """Returns the values of secret properties, and what is secret in all URLs among the values."""
        texts = {name: str(value) for name, value in properties.items()}
        found = [value for name, value in texts.items() if is_secret(name)]
        found += secrets_of_urls(texts.values())
        # librdkafka's error quotes the rest of this line, starting with the word that it cannot parse
        line = texts.get("sasl.oauthbearer.config", "")
        found += [line[at.start() :] for at in re.finditer(r"\S+", line)]
        # a header of HTTP contains both in base64
        for user, secret in _LOGINS:
            found += [f"{texts[user]}:{texts[secret]}"] if user in texts and secret in texts else ()
        return cls(frozenset(found))

    def __or__(self, other: Secrets) -> Secrets:
        return Secrets(self.values | other.values)

    def hide(self, text: str) -> str:
        """Returns the text of a library or server with every secret replaced by `MASK`.

        Finds values that are quoted, escaped, percent-encoded or encoded in base64. Replaces whole
        words only: a password ``kafka`` changes neither ``kafka.bootstrap.servers`` nor ``kafka:9092``.
        """
        forms = {form for value in self.values if value.strip() for form in _forms(value)}
        if not forms:
            return text
        longest_first = sorted(forms, key=len, reverse=True)  # one secret may contain another
        return re.sub(f"{_BEFORE}(?:{'|'.join(map(re.escape, longest_first))}){_AFTER}", MASK, text)


NO_SECRETS = Secrets()

#: User and secret that HTTP sends together.
_LOGINS = (
    ("sasl.username", "sasl.password"),
    ("sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret"),
)

#: A word contains dots and hyphens. An escaped or percent-encoded character may precede it.
_BEFORE = r"(?:(?<![\w-])(?<![\w-]\.)|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
#: The name of a host is followed by its port.
_AFTER = r"(?![\w-])(?!\.\w)(?!:\d)"


def _forms(value: str) -> set[str]:
    encoded = base64.b64encode(value.encode(errors="surrogatepass")).decode()
    return {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        quote(value, errors="replace"),
        quote(value, safe="", errors="replace"),
        quote_plus(value, errors="replace"),
        encoded,
        encoded.rstrip("="),
        encoded.replace("+", "-").replace("/", "_"),
        encoded.replace("+", "-").replace("/", "_").rstrip("="),
    }
