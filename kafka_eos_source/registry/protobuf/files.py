"""Compiles the text of a .proto file, with the files that it imports, to descriptors.

The compiler is the real protoc, which grpcio-tools contains. It runs in a process of its own, because it
reports errors on stderr. The files of a schema come from a registry, so their names are checked before they
reach a disk.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf.commons import FILES

_INSTALL = 'pip install "kafka-eos-source[protobuf]"'
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")
_PROTOC_SECONDS = 120
#: Runs without site, whose .pth files can take longer than protoc.
_PROTOC = (
    "import os, sys; sys.path[:0] = sys.argv.pop(1).split(os.pathsep); "
    "from grpc_tools import protoc; sys.exit(protoc.main(sys.argv))"
)


@lru_cache(maxsize=256)
def compile_schema(schema: Schema) -> Any:
    """Returns the descriptor of a schema's file (``google.protobuf.descriptor.FileDescriptor``).

    Raises:
        InvalidSchemaError: if protoc refuses the text, an import is missing, or a package is not installed.
    """
    if schema.format != "PROTOBUF":
        raise InvalidSchemaError(
            f"the schema has the format {schema.format}, but a Protobuf schema was expected",
            fix="use the functions of that format, or another subject",
        )
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
    except ImportError as failure:
        raise InvalidSchemaError(f"Protobuf schemas need a package: {failure}", fix=_INSTALL) from failure
    files = _referenced_files(schema)
    main = _unused_name(files)
    serialized = _serialized_file(schema.text)
    if serialized is None:
        files[main] = schema.text
    else:  # a client of the registry may store the descriptor itself; only its imports need protoc
        imports = "".join(f'import "{name}";\n' for name in serialized.dependency)
        files[main] = f'syntax = "proto3";\n{imports}'
    compiled = descriptor_pb2.FileDescriptorSet.FromString(_run_protoc(files, main))
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in compiled.file:
            if file.name != main:
                pool.Add(file)
            else:
                proto = file if serialized is None else serialized
                proto.name = main
                pool.Add(proto)
        return pool.FindFileByName(main)
    except (TypeError, KeyError) as failure:
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
    candidates = list(compile_schema(schema).message_types_by_name.values())
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
    path.append(list(message.file.message_types_by_name.values()).index(message))
    return tuple(reversed(path))


def list_messages(file: Any) -> list[Any]:
    """Lists the messages of a file, each before those that are nested in it."""
    found: list[Any] = []
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop(0)
        found.append(message)
        waiting = _nested(message) + waiting
    return found


def _nested(message: Any) -> list[Any]:
    """Lists nested messages as Confluent's Java client counts them: the entries of maps do not count."""
    return [each for each in message.nested_types if not each.GetOptions().map_entry]


def _referenced_files(schema: Schema) -> dict[str, str]:
    files: dict[str, str] = {}
    waiting = list(schema.references)
    while waiting:
        reference = waiting.pop()
        path = PurePosixPath(reference.name)
        if (
            path.is_absolute()
            or not path.parts
            or ".." in path.parts
            or re.search(r'[\\\0":]', reference.name)
        ):
            raise InvalidSchemaError(
                f"the reference {reference.name!r} of the schema is not a relative path",
                fix="register the reference under the path with which the schema imports it",
            )
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
        waiting.extend(reference.schema.references)
    return {**FILES, **files}


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
    folders = _include_folders()
    with tempfile.TemporaryDirectory(prefix="kafka-eos-protoc-") as root:
        for name, text in files.items():
            path = Path(root, "files", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        output = Path(root, "descriptors")
        packages = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-S", "-E", "-c", _PROTOC, packages]
        command += [f"-I{folder}" for folder in (Path(root, "files"), *folders)]
        command += ["--include_imports", f"--descriptor_set_out={output}", main]
        done = subprocess.run(command, capture_output=True, timeout=_PROTOC_SECONDS, cwd=root, check=False)
        if done.returncode or not output.exists():
            reason = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
            raise InvalidSchemaError(
                f"protoc refuses the schema (named {main} here): {reason}",
                fix="correct the schema, or register the files that it imports as references",
            )
        return output.read_bytes()


@lru_cache(maxsize=1)
def _include_folders() -> tuple[Path, ...]:
    """Returns the folders with google/protobuf/*.proto and, where it is installed, google/type/*.proto."""
    tools = importlib.util.find_spec("grpc_tools")
    if tools is None or tools.origin is None:
        raise InvalidSchemaError(
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
