"""Compiles the text of a .proto file, with the files that it imports, to descriptors.

The compiler is the real protoc, which grpcio-tools contains. It runs in a process of its own, because it
reports errors on stderr, and because the files of a schema come from a registry: a process can be given
limits of CPU time and memory. The names of the files are checked before they reach a disk.

How protoc ends decides whether the schema is at fault, or the machine::

    exit status 1, with a reason on stderr        the schema       InvalidSchemaError
    killed by SIGXCPU: its CPU time is used up    the schema       InvalidSchemaError
    crashed (SIGSEGV, SIGABRT, …), no memory      the schema       InvalidSchemaError
    killed by SIGKILL, SIGTERM, SIGINT, SIGHUP    the machine      RetriableError
    still running after `_PROTOC_SECONDS`         the machine      RetriableError
    cannot be started, or its files not written   the machine      RetriableError
    a package is not installed                    the installation InvalidOptionError
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from kafka_eos_source.documents.converted import inside
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, RetriableError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf_tree import KINDS

_INSTALL = 'pip install "kafka-eos-source[protobuf]"'
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")
#: The CPU time and memory of one run. Messages, fields or enums of 4 MiB take 2 s and 0.5 GiB, but protoc
#: needs quadratic time for ``reserved`` numbers and ranges of extensions.
_PROTOC_CPU_SECONDS = 10
_PROTOC_BYTES = 4 << 30
#: A busy machine needs long for this CPU time.
_PROTOC_SECONDS = 300
#: What the process exits with if it has not reached protoc.
_NOT_STARTED = 97
#: Runs without site, whose .pth files can take longer than protoc.
_PROTOC = f"""
import os, sys
sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
try:
    import resource
    from grpc_tools import protoc
    limits = {{"CPU": {_PROTOC_CPU_SECONDS}, "AS": {_PROTOC_BYTES}, "CORE": 0}}
    for name, most in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
except Exception as failure:
    print(f"{{type(failure).__name__}}: {{failure}}", file=sys.stderr)
    sys.exit({_NOT_STARTED})
sys.exit(protoc.main(sys.argv))
"""
#: By which a machine or a person ends processes, whatever they do.
_OF_MACHINE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Limits of file systems.
_LONGEST_STEP, _LONGEST_NAME = 255, 1024


def compile_schema(schema: Schema) -> Any:
    """Returns the descriptor of a schema's file (``google.protobuf.descriptor.FileDescriptor``).

    Raises:
        InvalidSchemaError: if protoc refuses the text, or an import is missing.
        InvalidOptionError: if a package is not installed.
        RetriableError: if protoc cannot be run.
    """
    found = _compiled(schema)
    if isinstance(found, InvalidSchemaError):
        raise found
    return found


@lru_cache(maxsize=256)
def _compiled(schema: Schema) -> Any:
    """Returns the descriptor, or why there is none, so that protoc runs once for the records of a schema."""
    try:
        return _compile(schema)
    except InvalidSchemaError as failure:
        return failure.with_traceback(None)


def _compile(schema: Schema) -> Any:
    if schema.format != "PROTOBUF":
        raise InvalidSchemaError(
            f"the schema has the format {schema.format}, but a Protobuf schema was expected",
            fix="use the functions of that format, or another subject",
        )
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message import DecodeError
    except ImportError as failure:
        raise InvalidOptionError(f"Protobuf schemas need a package: {failure}", fix=_INSTALL) from failure
    files = _referenced_files(schema)
    main = _unused_name(files)
    serialized = _serialized_file(schema.text)
    if serialized is None:
        files[main] = schema.text
    else:  # a client of the registry may store the descriptor itself; only its imports need protoc
        for name in serialized.dependency:
            _check_name(name)
        imports = "".join(f'import "{name}";\n' for name in serialized.dependency)
        files[main] = f'syntax = "proto3";\n{imports}'
    pool = descriptor_pool.DescriptorPool()
    try:
        compiled = descriptor_pb2.FileDescriptorSet.FromString(_run_protoc(files, main))
        for file in compiled.file:
            if file.name != main:
                pool.Add(file)
            else:
                proto = file if serialized is None else serialized
                proto.name = main
                pool.Add(proto)
        return pool.FindFileByName(main)
    except (TypeError, KeyError, ValueError, DecodeError) as failure:
        raise InvalidSchemaError(
            f"the descriptors of the schema do not fit together: {failure}", fix="correct the schema"
        ) from failure


def find_message(schema: Schema, name: str) -> Any:
    """Returns the descriptor of the message with this full name, or simple name, in the schema's own file.

    Raises:
        InvalidSchemaError: if the file has no such message, or several of that simple name.
    """
    messages = list_messages(compile_schema(schema))
    found = [each for each in messages if each.full_name == name] or [
        each for each in messages if each.name == name
    ]
    if len(found) != 1:
        raise InvalidSchemaError(
            f"the schema has {'several messages' if found else 'no message'} named {name!r}; "
            f"its messages are: {', '.join(each.full_name for each in messages)}",
            fix="give the full name of one of them",
        )
    return found[0]


def message_at(schema: Schema, path: tuple[int, ...]) -> Any:
    """Returns the descriptor at a path: the index of a message in the file, then of nested messages.

    Raises:
        InvalidSchemaError: if the path leads to no message.
    """
    candidates = _outermost(compile_schema(schema))
    found = None
    for index in path:
        if not 0 <= index < len(candidates):
            raise InvalidSchemaError(
                f"the message path {list(path)} leads to no message of the schema",
                fix="check that the records were written with this schema id",
            )
        found = candidates[index]
        candidates = _nested(found)
    if found is None:
        raise InvalidSchemaError("the message path is empty", fix="give the index of a message, such as (0,)")
    return found


def path_of(message: Any) -> tuple[int, ...]:
    """Returns the path at which `message_at` finds the message."""
    path: list[int] = []
    while message.containing_type is not None:
        path.append(_nested(message.containing_type).index(message))
        message = message.containing_type
    path.append(_outermost(message.file).index(message))
    return tuple(reversed(path))


def list_messages(file: Any) -> list[Any]:
    """Lists the messages of a file, each before those that are nested in it."""
    found: list[Any] = []
    waiting = [*reversed(_outermost(file))]
    while waiting:
        message = waiting.pop()
        found.append(message)
        waiting.extend(reversed(_nested(message)))
    return found


@lru_cache(maxsize=256)
def sorted_messages(file: Any) -> tuple[Any, ...]:
    """Lists the messages of a file as AWS Glue numbers them: by full name, with the entries of maps."""
    found: list[Any] = []
    waiting = [*_outermost(file)]
    while waiting:
        message = waiting.pop()
        found.append(message)
        waiting.extend(message.nested_types)
    return tuple(sorted(found, key=lambda each: each.full_name))


@lru_cache(maxsize=256)  # each record can have a path of its own
def _outermost(file: Any) -> tuple[Any, ...]:
    return tuple(file.message_types_by_name.values())


@lru_cache(maxsize=1024)
def _nested(message: Any) -> tuple[Any, ...]:
    """Lists nested messages as Confluent's Java client counts them: the entries of maps do not count."""
    return tuple(each for each in message.nested_types if not each.GetOptions().map_entry)


def _referenced_files(schema: Schema) -> dict[str, str]:
    files: dict[str, str] = {}
    for reference in schema.imports():
        _check_name(reference.name)
        if _serialized_file(reference.schema.text) is not None:
            raise InvalidSchemaError(
                f"the reference {reference.name!r} is stored as a serialized descriptor, not as text",
                fix="register its text",
            )
        if files.setdefault(reference.name, reference.schema.text) != reference.schema.text:
            raise InvalidSchemaError(
                f"two references of the schema have the name {reference.name!r} and different texts",
                fix="register the schema again, with one version of that file",
            )
    files = {**FILES, **files}
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
    for name in files:
        if name in folders:
            raise InvalidSchemaError(
                f"the reference {name!r} of the schema is also the folder of another one",
                fix="register the references under the paths with which the schema imports them",
            )
    return files


def _check_name(name: str) -> None:
    """Checks that a name is that of a file below any folder, on any file system."""
    path = PurePosixPath(name)
    encoded = name.encode("utf-8", "surrogatepass")
    if (
        path.is_absolute()
        or not path.parts
        or str(path) != name  # protoc does not normalize paths
        or ".." in path.parts
        or not name.isprintable()  # neither control characters nor half of a surrogate pair
        or re.search(r'[\\":]', name)
        or len(encoded) > _LONGEST_NAME
        or any(len(step.encode("utf-8", "surrogatepass")) > _LONGEST_STEP for step in path.parts)
    ):
        shown = name if len(name) <= _LONGEST_STEP else f"{name[:_LONGEST_STEP]}…"
        raise InvalidSchemaError(
            f"the reference {shown!r} of the schema is not a relative path of at most {_LONGEST_STEP} bytes "
            f"for each step, and {_LONGEST_NAME} altogether",
            fix="register the reference under the path with which the schema imports it",
        )


def _unused_name(files: dict[str, str]) -> str:
    name = "schema.proto"
    while name in files:
        name = f"_{name}"
    return name


def _serialized_file(text: str) -> Any | None:
    """Returns the FileDescriptorProto that the text is in base64; None for the text of a .proto file."""
    if not text.strip() or not _BASE64.fullmatch(text):
        return None
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    try:
        return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=False))
    except (binascii.Error, DecodeError):
        return None


def _run_protoc(files: dict[str, str], main: str) -> bytes:
    """Returns what protoc makes of some files. Raises as `compile_schema`."""
    folders = _include_folders()
    try:
        contents = {name: text.encode() for name, text in files.items()}
    except UnicodeEncodeError as failure:
        raise InvalidSchemaError(
            f"the schema contains half of a surrogate pair: {failure.reason}", fix="correct the schema"
        ) from failure
    try:
        with tempfile.TemporaryDirectory(prefix="kafka-eos-protoc-") as root:
            for name, data in contents.items():
                path = Path(root, "files", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            output = Path(root, "descriptors")
            packages = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-S", "-E", "-c", _PROTOC, packages]
            command += [f"-I{folder}" for folder in (Path(root, "files"), *folders)]
            command += ["--include_imports", f"--descriptor_set_out={output}", main]
            done = subprocess.run(
                command, capture_output=True, timeout=_PROTOC_SECONDS, cwd=root, check=False
            )
            if not done.returncode and output.exists():
                return output.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise RetriableError(
            f"protoc could not compile the schema: {failure}. This says nothing about the schema.",
            fix="check the load, the memory and the temporary folder of the machine.",
        ) from failure
    reason = done.stderr.decode("utf-8", "replace").replace(f"{root}/files/", "").strip()
    if done.returncode == _NOT_STARTED:
        raise RetriableError(
            f"protoc cannot be started: {reason}. This says nothing about the schema.", fix=_INSTALL
        )
    if -done.returncode in _OF_MACHINE:
        raise RetriableError(
            f"somebody ended protoc with signal {-done.returncode}. This says nothing about the schema.",
            fix="check whether the machine has enough memory.",
        )
    if -done.returncode == signal.SIGXCPU:
        reason = f"it takes more than {_PROTOC_CPU_SECONDS} s of CPU time"
    raise InvalidSchemaError(
        f"protoc refuses the schema (named {main} here): {reason or f'exit status {done.returncode}'}",
        fix="correct the schema, or register the files that it imports as references",
    )


@lru_cache(maxsize=1)
def _include_folders() -> tuple[Path, ...]:
    """Returns the folders with google/protobuf/*.proto and, where it is installed, google/type/*.proto."""
    tools = importlib.util.find_spec("grpc_tools")
    if tools is None or tools.origin is None:
        raise InvalidOptionError(
            "Protobuf schemas need protoc, which the package grpcio-tools contains", fix=_INSTALL
        )
    folders = [Path(tools.origin).parent / "_proto"]
    try:
        types = importlib.util.find_spec("google.type")
    except ModuleNotFoundError:
        types = None
    for place in (types.submodule_search_locations or ()) if types else ():
        folders.append(Path(place).parent.parent)
    return tuple(folders)


# -- compatibility -------------------------------------------------------------------------------

_VARINTS = {8: 1, 14: 32, 5: 32, 13: 33, 3: 64, 4: 65}
#: Kinds of encodings between which Protobuf converts: FieldDescriptor.TYPE_… → family and bits.
_FAMILIES = {
    **{kind: ("varint", bits) for kind, bits in _VARINTS.items()},
    17: ("zigzag", 32),
    18: ("zigzag", 64),
    15: ("fixed32", 32),
    7: ("fixed32", 33),
    16: ("fixed64", 64),
    6: ("fixed64", 65),
    2: ("float", 32),
    1: ("double", 64),
    9: ("bytes", 1),
    12: ("bytes", 2),
    11: ("message", 0),
    10: ("group", 0),
}


def check_readable(writer: Any, reader: Any) -> None:
    """Checks that each field of a writer's message, which the reader's message has too, keeps its value.

    Raises:
        InvalidSchemaError: if the reader would skip or change values. It names the field and both types.
    """
    seen = {(writer.full_name, reader.full_name)}
    waiting = [(writer, reader, "")]
    while waiting:
        written, read, path = waiting.pop()
        for field in written.fields:
            other = read.fields_by_number.get(field.number)
            if other is None:
                continue
            place = inside(path, f".{other.name}").lstrip(".")
            if not _fits(field, other):
                raise InvalidSchemaError(
                    f"field {place!r} (number {field.number}): the writer has {describe(field)}, "
                    f"the reader has {describe(other)}, and Protobuf does not convert these without loss",
                    fix="give the changed field a new number, or read with a schema that has the writer's "
                    "type",
                )
            if field.message_type is not None and other.message_type is not None:
                pair = (field.message_type.full_name, other.message_type.full_name)
                if pair not in seen:
                    seen.add(pair)
                    waiting.append((field.message_type, other.message_type, place))


def _fits(writer: Any, reader: Any) -> bool:
    written, bits = _FAMILIES[writer.type]
    read, room = _FAMILIES[reader.type]
    if written != read or bits > room or (bits, room) in ((32, 33), (64, 65), (32, 65)):
        return False
    if writer.is_repeated and not reader.is_repeated:
        return False
    if writer.message_type is not None:
        entries = [each.message_type.GetOptions().map_entry for each in (writer, reader)]
        return bool(entries[0] == entries[1])
    return True


def describe(field: Any) -> str:
    """Returns the type of a field as a schema writes it."""
    name = field.message_type.full_name if field.message_type is not None else KINDS[field.type].name.lower()
    return f"repeated {name}" if field.is_repeated else name


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

_DECIMAL_ALIAS = """
syntax = "proto3";
package confluent.types;
import public "confluent/type/decimal.proto";
"""

#: Of AWS Glue's Kafka Connect converter.
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
    "confluent/types/decimal.proto": _DECIMAL_ALIAS,
}
