"""Reads the text of .proto files as Confluent's Java client does, which accepts more than protoc.

Java's client parses a file without the files that it imports. It skips imports that are not among the
references of a schema, and options that nobody declared, so a registry can contain files such as this one::

    import "buf/validate/validate.proto";          // not registered
    message User {
      string email = 1 [(buf.validate.field).string.email = true];
    }

Custom options and services do not change how messages are encoded: `essence` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

#: Comments; texts; numbers, some of which have a sign inside; words; and single characters. If nothing ends a
#: comment, it goes on to the end of the file, and a text to that of its line. So each character is looked at
#: once.
_TOKEN = re.compile(
    r"""(?:\s+|//[^\n]*|/\*.*?(?:\*/|\Z))|("(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?"""
    r"""|\d[\w.]*(?:(?<=[eE])[+-]\d+)?|[\w.]+|.)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
#: The options that decide how messages are encoded, or whether their file is valid. `features.…` do, too.
_KEPT = frozenset({"allow_alias", "message_set_wire_format", "default", "packed"})
#: Java's client does not compare the names that fields have in JSON.
_ANY_JSON_NAMES = "option deprecated_legacy_json_field_conflicts = true;"
#: How `essence` marks the entries of maps. No other option that it keeps has this name.
ENTRY_MARK = "no_standard_descriptor_accessor"


def imported_files(text: str) -> list[str]:
    """Returns the paths that a file imports, in its order."""
    return [_path(statement) for statement in _statements(text) if statement[0] == "import"]


def has_written_entries(text: str) -> bool:
    """Returns whether entries of maps are written as messages, as in a text that was made of a descriptor."""
    return "map_entry" in text and any(
        statement[:2] == ["option", "map_entry"] for statement in _statements(text)
    )


def essence(text: str, files: Mapping[str, str]) -> str:
    """Returns the part of a file that decides how its messages are encoded.

    The registry makes texts of the descriptors that some clients register. In these, the entries of maps are
    messages with the option `map_entry`, which protoc refuses in a text. Here they have `ENTRY_MARK` instead.

    Args:
        text: the file.
        files: the files that can be imported: path → the name under which protoc finds it. Other imports are
            left out.
    """
    made: list[str] = []
    levels_of_service = 0
    for statement in _statements(text):
        first, last = statement[0], statement[-1]
        if levels_of_service or (first == "service" and last == "{"):
            levels_of_service += (last == "{") - (last == "}")
        elif first == "import":
            if (path := _path(statement)) in files:
                how = statement[1] if statement[1] in ("public", "weak") else ""
                made.append(f'import {how} "{files[path]}";')
        elif first == "reserved":  # Java's client writes empty ranges
            continue
        elif first != "option":
            made += _without_options(statement)
            if last == "{" and first == "message":
                made.append(_ANY_JSON_NAMES)
        elif _is_entry(statement):
            made.append(f"option {ENTRY_MARK} = true;")
        elif _is_kept(statement[1:]):
            made += statement
    return " ".join(made)


def _statements(text: str) -> Iterator[list[str]]:
    """Splits a file into the tokens of statements, each of which ends with ``;``, ``{`` or ``}``."""
    statement: list[str] = []
    inside = 0  # levels of the values of options
    for found in _TOKEN.finditer(text):
        token = found[1]
        if token is None:
            continue
        statement.append(token)
        if token == "[" or (token == "{" and (inside or statement[0] == "option")):
            inside += 1
        elif inside and token in ("]", "}"):
            inside -= 1
        elif not inside and token in (";", "{", "}"):
            yield statement
            statement = []
    if statement:
        yield statement


def _is_entry(statement: list[str]) -> bool:
    return statement[:4] == ["option", "map_entry", "=", "true"]


def _path(statement: list[str]) -> str:
    """Returns the path in an import."""
    return "".join(_ESCAPE.sub(r"\1", token[1:-1]) for token in statement if token[0] in "\"'")


def _without_options(statement: list[str]) -> list[str]:
    """Returns a field, or the value of an enum, without the options in its brackets that are left out."""
    if "[" not in statement:
        return statement
    begin = statement.index("[")
    end = len(statement) - statement[::-1].index("]") if "]" in statement else len(statement)
    options: list[list[str]] = [[]]
    inside = 0
    for token in statement[begin + 1 : end - 1]:
        inside += (token in ("[", "{")) - (token in ("]", "}"))
        if token == "," and not inside:
            options.append([])
        else:
            options[-1].append(token)
    kept = [" ".join(each) for each in options if _is_kept(each)]
    return [*statement[:begin], *([f"[{', '.join(kept)}]"] if kept else []), *statement[end:]]


def _is_kept(option: list[str]) -> bool:
    name = option[: option.index("=")] if "=" in option else []
    return bool(name) and "(" not in name and (name[0] in _KEPT or name[0].partition(".")[0] == "features")


# -- files that every registry knows -------------------------------------------------------------

_META = """
syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta {
  string doc = 1;
  map<string, string> params = 2;
  repeated string tags = 3;
  repeated Rule rules = 4;
}
message Rule { string name = 1; string doc = 2; string expr = 3; string sql = 4; }
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
"""

_DECIMAL = """
syntax = "proto3";
package confluent.type;
message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }
"""

_VARIANT = """
syntax = "proto3";
package confluent.type;
message Variant { bytes metadata = 1; bytes value = 2; }
"""

_DECIMAL_ALIAS = """
syntax = "proto3";
package confluent.types;
import public "confluent/type/decimal.proto";
"""

#: Of AWS Glue's converter for Kafka Connect.
_GLUE_DECIMAL = """
syntax = "proto3";
package additionalTypes;
message Decimal { int64 units = 1; int32 fraction = 2; uint32 precision = 3; int32 scale = 4; }
"""

#: Path → text.
FILES = {
    "additionalTypes/decimal.proto": _GLUE_DECIMAL,
    "confluent/meta.proto": _META,
    "confluent/type/decimal.proto": _DECIMAL,
    "confluent/type/variant.proto": _VARIANT,
    "confluent/types/decimal.proto": _DECIMAL_ALIAS,
}
