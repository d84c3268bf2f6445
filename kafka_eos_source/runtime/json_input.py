"""Parses JSON that other programs wrote.

No other module of the package parses JSON, except `documents.decode`, for documents with a declared schema.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

#: Levels of arrays and objects inside each other. Parsers read as many as their stack allows, which differs
#: from process to process, and some write no more than 254.
MOST_LEVELS = 254
#: A text of a document, also one without an end, so that each byte is looked at once.
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))

#: What Python raises while a program takes apart a parsed document that has another shape than expected,
#: such as ``found["batch"]`` of an array, or ``float(found["seconds"])`` of an integer with 400 digits.
SHAPE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class JsonError(ValueError):
    """A text is not JSON, or is JSON that this package does not read. The text of the error says why."""


def parse_json(
    text: str | bytes,
    *,
    parse_float: Callable[[str], Any] | None = None,
    parse_int: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parses a JSON document of another program, whatever bytes it consists of.

    Args:
        text: the document. Bytes are UTF-8, with or without a byte order mark.
        parse_float, parse_int, object_pairs_hook: as for ``json.loads``; they may raise ValueError.

    Returns:
        The document. Its texts can be encoded, its floats are finite, and it has at most `MOST_LEVELS`
        levels.

    Raises:
        JsonError: for any other text.
    """
    try:
        document = text if isinstance(text, str) else text.decode("utf-8-sig")
        found = _decoder(parse_float or _finite, parse_int, object_pairs_hook).decode(document)
        if "\\ud" in document or "\\uD" in document or not document.isascii():
            _check_characters(document, found)
    except JsonError:
        raise
    except ValueError as error:  # includes UnicodeError, and integers with more digits than Python converts
        raise JsonError(str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    if (
        len(text) > 2 * MOST_LEVELS
        and document.count("[") + document.count("{") > MOST_LEVELS
        and _is_too_deep(found)
    ):
        raise _too_deep()
    return found


def is_json(text: str) -> bool:
    """Returns whether a text follows the grammar of JSON (RFC 8259), whatever other limits its reader has.

    Numbers may have any size. A text that is nested deeper than this process can follow counts as JSON.
    """
    try:
        json.loads(text, parse_int=_nothing, parse_float=_nothing, parse_constant=_no_json)
    except ValueError:
        return False
    except RecursionError:
        return True
    return True


def _nothing(_: str) -> int:
    return 0


def _no_json(constant: str) -> int:
    raise ValueError(constant)


def parse_json_fast(document: bytes) -> Any:
    """Parses a document as `parse_json` does, but with msgspec, for records.

    Raises:
        JsonError: if the bytes are not JSON.
    """
    return _untyped_parser()(document)


def typed_parser(expected: Any) -> Callable[[bytes], Any]:
    """Returns a parser for documents of a type, as msgspec understands types; it skips what the type lacks.

    Texts, levels and numbers are checked as by `parse_json`, except numbers that are skipped. The parser
    raises `JsonError` for bytes that are not JSON, and for documents of other types.
    """
    import msgspec  # belongs to the extra `jsonschema`

    decode = msgspec.json.Decoder(expected).decode

    def parse(document: bytes) -> Any:
        try:
            if not document.isascii():
                document = document.removeprefix(codecs.BOM_UTF8)
                document.decode()  # msgspec does not look at the characters of a text that it skips
            if _has_too_many_levels(document):
                raise _too_deep()
            return decode(document)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise JsonError(str(error)) from None

    return parse


@functools.lru_cache(maxsize=1)
def _untyped_parser() -> Callable[[bytes], Any]:
    return typed_parser(Any)


def _has_too_many_levels(document: bytes) -> bool:
    if len(document) <= 2 * MOST_LEVELS or document.count(b"[") + document.count(b"{") <= MOST_LEVELS:
        return False
    brackets = _TEXT.sub(b"", document).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MOST_LEVELS


@functools.lru_cache(maxsize=16)
def _decoder(parse_float: Any, parse_int: Any, object_pairs_hook: Any) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_float=parse_float,
        parse_int=parse_int,
        parse_constant=_refused,
        object_pairs_hook=object_pairs_hook,
    )


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise JsonError(f"the number {text[:40]} does not fit into a double")
    return number


def _refused(constant: str) -> Any:
    raise JsonError(f"{constant} is not JSON")


def _check_characters(document: str, found: Any) -> None:
    """Refuses half of a surrogate pair, which Python's parser accepts and no encoder does."""
    document.encode()
    if "\\ud" in document or "\\uD" in document:
        json.dumps(found, ensure_ascii=False, default=str).encode()


def _is_too_deep(document: Any) -> bool:
    """Returns whether a document has too many levels. Walks it level by level, without recursion."""
    level = [document] if isinstance(document, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        level = [
            each
            for container in level
            for each in (container.values() if isinstance(container, dict) else container)
            if isinstance(each, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_deep() -> JsonError:
    return JsonError(f"it is nested more than {MOST_LEVELS} levels deep")
