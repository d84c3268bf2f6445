"""Checks property names and values with librdkafka itself, in a configuration without a client."""

from __future__ import annotations

import ctypes
import difflib
from functools import lru_cache
from types import TracebackType

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.native import ERROR_TEXT_BYTES, function
from kafka_eos_source.kafka.secrets import MASK, is_secret, shown

_CONF_OK = 0
_CONF_INVALID = -1
_CONF_UNKNOWN = -2
#: Signatures: the result first. Of ``_SET``, the last two arguments are the buffer of an error and its size.
_SET = (ctypes.c_int, ctypes.c_void_p, *[ctypes.c_char_p] * 3, ctypes.c_size_t)
_GET = (ctypes.c_int, ctypes.c_void_p, *[ctypes.c_char_p] * 2, ctypes.POINTER(ctypes.c_size_t))
#: Size of the buffer for a value that is read back, bytes. Only numbers and words are read back.
_VALUE_BYTES = 4096


class Properties:
    """An ``rd_kafka_conf_t``; a context manager."""

    def __init__(self) -> None:
        self._conf = function("rd_kafka_conf_new", ctypes.c_void_p)()

    def __enter__(self) -> Properties:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        function("rd_kafka_conf_destroy", None, ctypes.c_void_p)(self._conf)

    def set(self, name: str, value: str, *, stated_name: str, stated_value: str) -> None:
        """Sets a property (``rd_kafka_conf_set``).

        Args:
            name: librdkafka's name of the property.
            value: librdkafka's form of the value.
            stated_name: the name that the user wrote, without ``kafka.``.
            stated_value: the value that the user wrote.

        Raises:
            InvalidOptionError: if librdkafka does not have the property, or rejects the value.
        """
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        if _is_text(name) and _is_text(value):
            result = function("rd_kafka_conf_set", *_SET)(
                self._conf, name.encode(), value.encode(), text, len(text)
            )
        else:
            result, text.value = _CONF_INVALID, b"it has a character that no C text can contain"
        if result == _CONF_OK:
            return
        if result == _CONF_UNKNOWN:
            # the value is not shown: if the name is misspelt, it may be a password
            near = difflib.get_close_matches(stated_name, property_names(), n=2, cutoff=0.75)
            hint = f" Did you mean {' or '.join(repr('kafka.' + each) for each in near)}?" if near else ""
            raise InvalidOptionError(
                f"unknown option 'kafka.{stated_name}': librdkafka has no such property.{hint}",
                fix="correct or remove the option.",
            )
        why = text.value.decode(errors="replace").strip()
        if is_secret(stated_name) and value:
            why = why.replace(value, MASK)
        raise InvalidOptionError(
            f"option 'kafka.{stated_name}' has the value {shown(stated_name, stated_value)!r}; "
            f"librdkafka refuses it: {why}.",
            fix="correct or remove the option.",
        )

    def get(self, name: str) -> str:
        """Returns the value in librdkafka's form (``true`` for ``1``), or the default; "" = no default."""
        value = ctypes.create_string_buffer(_VALUE_BYTES)
        size = ctypes.c_size_t(len(value))
        found = function("rd_kafka_conf_get", *_GET)(self._conf, name.encode(), value, ctypes.byref(size))
        return value.value.decode() if found == _CONF_OK else ""


def _is_text(text: str) -> bool:
    """Returns whether C can read the text: no NUL, which would end it, and no lone surrogates."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def is_property(name: str) -> bool:
    """Returns whether librdkafka has a property of this name."""
    return name in property_names()


@lru_cache(maxsize=1)
def property_names() -> tuple[str, ...]:
    """Returns the names of all properties of this librdkafka: those with a default, and `WITHOUT_DEFAULT`."""
    conf = function("rd_kafka_conf_new", ctypes.c_void_p)()
    count = ctypes.c_size_t()
    strings = ctypes.POINTER(ctypes.c_char_p)
    dump = function("rd_kafka_conf_dump", strings, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))(
        conf, ctypes.byref(count)
    )
    names = {dump[index].decode() for index in range(0, count.value, 2)}
    function("rd_kafka_conf_dump_free", None, strings, ctypes.c_size_t)(dump, count)
    function("rd_kafka_conf_destroy", None, ctypes.c_void_p)(conf)
    return tuple(sorted(names | set(WITHOUT_DEFAULT)))


#: librdkafka's dump of defaults leaves out properties without a default, topic properties, and aliases.
WITHOUT_DEFAULT = (
    "acks",
    "bootstrap.servers",
    "client.rack",
    "compression.level",
    "compression.type",
    "delivery.timeout.ms",
    "group.id",
    "group.instance.id",
    "group.remote.assignor",
    "https.ca.location",
    "https.ca.pem",
    "linger.ms",
    "max.in.flight",
    "max.partition.fetch.bytes",
    "message.timeout.ms",
    "metadata.broker.list",
    "partitioner",
    "plugin.library.paths",
    "queuing.strategy",
    "request.required.acks",
    "request.timeout.ms",
    "retries",
    "sasl.kerberos.keytab",
    "sasl.mechanism",
    "sasl.oauthbearer.assertion.file",
    "sasl.oauthbearer.assertion.private.key.file",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.password",
    "sasl.username",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.curves.list",
    "ssl.engine.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.providers",
    "ssl.sigalgs.list",
)
