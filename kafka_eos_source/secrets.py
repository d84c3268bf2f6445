"""Decides what is secret, by the name of an option and in a URL, and hides it in the texts of libraries."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

MASK = "********"

#: Names of properties whose values are never shown: those that librdkafka, Java's clients and the clients of
#: schema registries treat as sensitive, and any other name that suggests a secret.
_SECRET = re.compile(
    r"passw|passphrase|secret|credential|jaas|\.pem$|ssl[._]key$|private\.?key|(^|[._-])token$"
    r"|oauthbearer\.config$|keystore\.key$|auth\.user\.info$|(api|access|app|application|account)[._-]?key"
    r"|^auth$|(^|[._-])(authorization|sas|sig|signature|pwd)$|connection[._-]string",
    re.IGNORECASE,
)
#: Name of the options that allow secrets to be sent over plain http, after the prefix of their kind.
ALLOW_HTTP = "allow.http"
#: A URL in a sentence.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
#: Schemes in which the name before the @ is a container, and not a user.
_AZURE = ("abfs", "abfss", "wasb", "wasbs")
#: Suffix of options whose value is the name of an environment variable.
FROM_ENVIRONMENT = ".env"
#: Parameters of a URL with an unsuspicious name are secret from this length on.
_LONG = 8
_PARAMETER = re.compile(r"[\w.-]{1,64}", re.ASCII)


def is_secret(name: str) -> bool:
    """Returns whether the value of a property must be hidden."""
    return _SECRET.search(name) is not None and not name.endswith(FROM_ENVIRONMENT)


def shown(name: str, value: str) -> str:
    """Returns the value of a property as messages may show it: `MASK` if it is secret."""
    return MASK if is_secret(name) else shown_text(value)


def shown_text(text: str) -> str:
    """Returns a text, in which each URL is as `shown_url` returns it."""
    return text if "://" not in text else ", ".join(map(shown_url, urls_in(text)))


def without_url_secrets(text: str) -> str:
    """Returns a sentence with each URL in it as `shown_url` returns it, if the URL has a user or a query."""
    if "://" not in text:
        return text
    return _URL.sub(lambda found: shown_text(found[0]) if set("@?") & set(found[0]) else found[0], text)


def urls_in(text: str) -> list[str]:
    """Returns the URLs of a list. A comma belongs to a URL unless the next one follows it."""
    return [each.strip() for each in re.split(r",(?=\s*[A-Za-z][\w+.-]*://)", text)]


def bare_url(url: str) -> str:
    """Returns a URL without user, password, query and fragment."""
    return _without_user(url).partition("?")[0]


def shown_url(url: str) -> str:
    """Returns a URL as messages may show it: without user, password and fragment, its query with `MASK`.

    All values of the query are masked, because no list of the names that services give to their keys is
    complete. The path is shown.
    """
    bare, _, query = _without_user(url).partition("?")
    parts = [each.partition("=") for each in re.split("[&;]", query) if each]
    shown = [f"{name}={MASK}" if equals and _PARAMETER.fullmatch(name) else MASK for name, equals, _ in parts]
    return f"{bare}?{'&'.join(shown)}" if shown else bare


def _without_user(url: str) -> str:
    """Returns a URL without user, password and fragment.

    Some libraries accept passwords that contain a slash or a question mark. Without an ``@`` next to the
    host, a colon may begin such a password. Then only what is no secret in either reading remains.
    """
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "", scheme
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host and scheme in _AZURE and ":" not in rest.rpartition("@")[0]:
        pass
    elif "@" in host:
        path, mark, query = rest[host.rindex("@") + 1 :].partition("?")
        rest = f"{path.rpartition('@')[2]}{mark}{query}"
    elif ":" in host and "@" in rest:
        before, _, after = rest.rpartition("@")
        rest = "" if re.search(r"[?#]", before) else after
    return f"{scheme}{separator}{rest.partition('#')[0]}"


def url_secrets(url: str, *, only_named: bool = False) -> list[str]:
    """Returns what is secret in a URL, as it is written and decoded; the whole text if it is not a URL.

    That is the password, a user without password, which services use for keys, and of the query every value
    that has the name of a secret or at least eight characters.

    Args:
        url: the URL.
        only_named: of the query, return only the values that have the name of a secret.
    """
    try:
        parts = urlsplit(url.strip())
        found = [parts.password or ""]
        if parts.scheme in ("http", "https") and parts.username and not parts.password:
            found.append(parts.username)
    except ValueError:
        return [url]
    decoded = [unquote(each) for each in found]
    for each in re.split("[&;]", parts.query):
        name, _, value = each.partition("=")
        if is_secret(unquote_plus(name)) or (len(value) >= _LONG and not only_named):
            found.append(value)
            decoded.append(unquote_plus(value))
    return sorted({each for each in (*found, *decoded) if each})


def secrets_of_urls(texts: Iterable[str]) -> list[str]:
    """Returns what is secret in all URLs among these texts."""
    return [each for text in texts if "://" in text for url in urls_in(text) for each in url_secrets(url)]


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address always means this host. Does not ask DNS."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        name = host.rstrip(".").lower()
        return name == "localhost" or name.endswith(".localhost")


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
