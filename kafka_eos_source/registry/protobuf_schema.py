"""Compiles a .proto file, with the files that it imports, to descriptors. Each is a text, or a descriptor.

The compiler is the real protoc, which grpcio-tools contains. It runs in a process of its own, because it
reports errors on stderr, and because the files of a schema come from a registry: a process can be given
limits of CPU time and memory. The names of the files are checked before they reach a disk.

How protoc ends decides whether the schema is at fault, or the machine::

    exit status 1, with a reason, twice           the schema       InvalidSchemaError
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from kafka_eos_source.documents.converted import inside
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, RetriableError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf_text import (
    ENTRY_MARK,
    FILES,
    essence,
    has_written_entries,
    imported_files,
)
from kafka_eos_source.registry.protobuf_tree import KINDS

_INSTALL = 'pip install "kafka-eos-source[protobuf]"'
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")
#: The CPU time and memory of one run. Messages, fields or enums of 4 MiB take 2 s and 0.5 GiB, but protoc
#: needs quadratic time for ``reserved`` numbers and ranges of extensions.
_PROTOC_CPU_SECONDS = 10
_PROTOC_BYTES = 4 << 30
#: Time limit of a run: a busy machine needs much longer than the CPU time.
_PROTOC_SECONDS = 300
#: What protoc exits with if it refuses a file, and the process if it has not reached protoc.
_REFUSED, _NOT_STARTED = 1, 97
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
#: Signals by which the machine or a person ends a process, whatever it is doing.
_OF_MACHINE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Limits of file systems.
_LONGEST_STEP, _LONGEST_PATH = 255, 1024
_GROUP = 10  # FieldDescriptor.TYPE_GROUP
#: What protoc's library writes to stderr beside the reason, such as that a file does not name its syntax.
_LOGGED = re.compile(r"^(?:WARNING: All log messages|[IW]\d{4} ).*\n?", re.MULTILINE)


def compile_schema(schema: Schema) -> Any:
    """Returns the descriptor of a schema's file (``google.protobuf.descriptor.FileDescriptor``).

    For a file that only imports another one publicly, returns that of the other one.

    Raises:
        InvalidSchemaError: if the schema is not usable.
        InvalidOptionError: if a package is not installed.
        RetriableError: if protoc cannot be run.
    """
    return _file(schema).descriptor


@dataclass(frozen=True)
class _File:
    """A compiled file.

    Attributes:
        descriptor: Google's descriptor of it.
        is_proto2: whether it can have groups.
        counts_all: whether the entries of maps, and groups, count in the paths of messages.
    """

    descriptor: Any
    is_proto2: bool
    counts_all: bool

    def messages(self, outer: Any | None, counts_all: bool) -> tuple[Any, ...]:
        """Lists the messages of the file, or inside a message, that count in a path."""
        if outer is None:
            return _outermost(self.descriptor)
        return outer.nested_types if counts_all else _nested(outer, self.is_proto2)


def _file(schema: Schema) -> _File:
    found = _compiled(schema)
    if isinstance(found, InvalidSchemaError):
        raise found
    return found


@lru_cache(maxsize=256)
def _compiled(schema: Schema) -> _File | InvalidSchemaError:
    """Returns the file, or why there is none, so that protoc runs once for the records of a schema."""
    try:
        return _compile(schema)
    except InvalidSchemaError as failure:
        return failure.with_traceback(None)


def _compile(schema: Schema) -> _File:
    if schema.format != "PROTOBUF":
        raise InvalidSchemaError(
            f"the schema has the format {schema.format}, but a Protobuf schema was expected",
            fix="use the functions of that format, or another subject",
        )
    try:
        from google.protobuf import descriptor_pool
        from google.protobuf.message import DecodeError
    except ImportError as failure:
        raise InvalidOptionError(f"Protobuf schemas need a package: {failure}", fix=_INSTALL) from failure
    files = _Files(schema)
    try:
        compiled = {each.name: each for each in files.compile().file}
        pool = descriptor_pool.DescriptorPool()
        for each in compiled.values():
            pool.Add(each)
        name = _imported_whole(compiled[files.main]) or files.main
        syntax = compiled[name].syntax
        return _File(pool.FindFileByName(name), syntax in ("", "proto2"), files.counts_all(name))
    except (TypeError, KeyError, ValueError, DecodeError) as failure:
        raise InvalidSchemaError(
            f"the descriptors of the schema do not fit together: {failure}", fix="correct the schema"
        ) from failure


def _imported_whole(file: Any) -> str | None:
    """Returns the file that a file without contents imports publicly, as Confluent's Java client does."""
    has_contents = file.message_type or file.enum_type or file.extension or file.service
    is_import = len(file.dependency) == len(file.public_dependency) == 1
    return file.dependency[0] if is_import and not has_contents else None


class _Files:
    """The files of a schema, with names that are safe on any disk.

    A file is text, or a descriptor: clients of the registry store both. protoc gets the files as they are, if
    it can. If it refuses them, it gets what Confluent's Java client reads of them (`protobuf_text`).

    Attributes:
        main: the name of the schema's own file.
        texts: the text of each file, by name.
        descriptors: the files that are stored as descriptors, likewise.
    """

    def __init__(self, schema: Schema) -> None:
        self.texts: dict[str, str] = dict(FILES)
        self.descriptors: dict[str, Any] = {}
        #: The name of each file that can be imported, by the path with which files import it.
        self._names = {path: path for path in FILES}
        found: dict[str, Schema] = {}
        for each in schema.imports():  # Java's client takes the first of several with the same path
            if not (each.name.startswith("google/protobuf/") and each.name in _included()):
                found.setdefault(each.name, each.schema)
        self._is_usual = _are_usual(found)
        paths: dict[Schema, str] = {}
        for number, (path, file) in enumerate(found.items()):
            name = self._names[path] = path if self._is_usual else f"import{number}.proto"
            first = paths.setdefault(file, name)
            if first == name:
                self._add(name, file.text)
            else:  # one file under two paths would define each type twice
                self.texts[name] = f'syntax = "proto3"; import public "{first}";'
        self.main = "schema.proto"
        while self.main in self._names.values():
            self.main = f"_{self.main}"
        self._add(self.main, schema.text)

    def counts_all(self, name: str) -> bool:
        """Returns whether the entries of maps count in the paths of a file's messages."""
        return name in self.descriptors or has_written_entries(self.texts.get(name, ""))

    def _add(self, name: str, text: str) -> None:
        descriptor = _serialized_file(text)
        if descriptor is None:
            self.texts[name] = text
            return
        self.texts.pop(name, None)
        descriptor.name = name
        self.descriptors[name] = descriptor

    def compile(self) -> Any:
        """Returns the descriptors of the files, a FileDescriptorSet, each after those that it imports.

        Raises:
            InvalidSchemaError, RetriableError, InvalidOptionError: see `compile_schema`.
        """
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        reason = ""
        if self._is_usual and not any(map(has_written_entries, self.texts.values())):
            found = _run_protoc(self.texts, [*self.descriptors.values()], self.main)
            if isinstance(found, bytes):
                return FileDescriptorSet.FromString(found)
            reason = found
        for text in self.texts.values():
            for path in imported_files(text):
                self._include(path)
        for descriptor in self.descriptors.values():
            self._reduce(descriptor)
        texts = {name: essence(text, self._names) for name, text in self.texts.items()}
        found = _run_protoc(texts, [*self.descriptors.values()], self.main)
        if isinstance(found, str):
            raise InvalidSchemaError(
                f"protoc refuses the schema (named {self.main} here): {reason or self._named(found)}",
                fix="correct the schema, or register the files that it imports as references",
            )
        made = FileDescriptorSet.FromString(found)
        for file in made.file:
            if file.name in texts:
                _restore_entries(file.message_type)
        return made

    def _named(self, reason: str) -> str:
        """Returns a reason of protoc with the paths of the schema's references."""
        for path, name in self._names.items():
            reason = reason if path == name else reason.replace(name, path)
        return reason

    def _include(self, path: str) -> bool:
        """Returns whether a file can be imported, as a reference or as one that everybody has."""
        if path not in self._names and path in _included():
            self._names[path] = path
        return path in self._names

    def _reduce(self, descriptor: Any) -> None:
        """Removes imports that are not there, and what only protoc refuses in messages."""
        known = {path for path in set(descriptor.dependency) if self._include(path)}
        kept = [at for at, path in enumerate(descriptor.dependency) if path in known]
        places = {at: place for place, at in enumerate(kept)}
        paths = [self._names[descriptor.dependency[at]] for at in kept]
        public = [places[at] for at in descriptor.public_dependency if at in places]
        for name in ("dependency", "public_dependency", "weak_dependency"):
            descriptor.ClearField(name)
        descriptor.dependency.extend(paths)
        descriptor.public_dependency.extend(public)
        waiting = [*descriptor.message_type]
        while waiting:
            message = waiting.pop()
            waiting.extend(message.nested_type)
            message.options.deprecated_legacy_json_field_conflicts = True
            _join_oneofs(message)


def _join_oneofs(message: Any) -> None:
    """Puts the members of each oneof beside each other."""
    first: dict[int, int] = {}
    places = [
        (first.setdefault(field.oneof_index, at) if field.HasField("oneof_index") else at, at)
        for at, field in enumerate(message.field)
    ]
    if places != sorted(places):
        ordered = type(message)(field=[message.field[at] for _, at in sorted(places)])
        message.ClearField("field")
        message.field.extend(ordered.field)


def _restore_entries(messages: Any) -> None:
    """Makes entries of maps of the messages that `essence` has marked."""
    waiting = [*messages]
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_type)
        if message.options.HasField(ENTRY_MARK):
            message.options.ClearField(ENTRY_MARK)
            message.options.map_entry = [each.number for each in message.field] == [1, 2]


def find_message(schema: Schema, name: str) -> Any:
    """Returns the descriptor of the message with this full name, or simple name, in the schema's own file.

    Raises:
        InvalidSchemaError: if the file has no such message, or several of that simple name.
    """
    messages = list_messages(schema)
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


def message_at(schema: Schema, path: tuple[int, ...], name: str | None = None) -> Any:
    """Returns the descriptor at a path: the index of a message in the file, then of nested messages.

    Confluent's clients count differently if the schema is a text: its Java client does not count the entries
    of maps and groups, and those that have the descriptor of a message count them. So if the path leads to no
    message, or to one of another name than expected, the other way to count is tried.

    Args:
        schema: the schema.
        path: the path.
        name: the name of the message that is expected, without its package.

    Raises:
        InvalidSchemaError: if the path leads to no message.
    """
    if not path:
        raise InvalidSchemaError("the message path is empty", fix="give the index of a message, such as (0,)")
    file = _file(schema)
    ways = (True,) if file.counts_all else (False, True)
    found = [_message_at(file, path, counts_all) for counts_all in ways]
    known = [each for each in found if each is not None]
    if not known:
        raise InvalidSchemaError(
            f"the message path {list(path)} leads to no message of the schema",
            fix="check that the records were written with this schema id",
        )
    return next((each for each in known if each.name == name), known[0])


def _message_at(file: _File, path: tuple[int, ...], counts_all: bool) -> Any | None:
    found = None
    for index in path:
        candidates = file.messages(found, counts_all)
        if not 0 <= index < len(candidates):
            return None
        found = candidates[index]
    return None if found is None or found.GetOptions().map_entry else found


def path_of(schema: Schema, message: Any) -> tuple[int, ...]:
    """Returns the path at which `message_at` finds the message."""
    file = _file(schema)
    path: list[int] = []
    while message is not None:
        path.append([*file.messages(message.containing_type, file.counts_all)].index(message))
        message = message.containing_type
    return tuple(reversed(path))


def list_messages(schema: Schema) -> list[Any]:
    """Lists the messages of the schema's own file, each before those that are nested in it."""
    file = _file(schema)
    found: list[Any] = []
    waiting = [*reversed(_outermost(file.descriptor))]
    while waiting:
        message = waiting.pop()
        found.append(message)
        waiting.extend(reversed(_nested(message, file.is_proto2)))
    return found


def numbered_message(schema: Schema, number: int) -> Any:
    """Returns the descriptor of the message with a number (see `number_of`).

    Raises:
        InvalidSchemaError: if there is none.
    """
    messages = _sorted(compile_schema(schema))
    if number >= len(messages) or messages[number].GetOptions().map_entry:
        raise InvalidSchemaError(
            f"the message number {number} leads to no message of the schema, which has {len(messages)}",
            fix="check that the records were written with this schema version",
        )
    return messages[number]


def number_of(message: Any) -> int:
    """Returns the number of a message in its file, as AWS Glue's serializers write it."""
    return _sorted(message.file).index(message)


@lru_cache(maxsize=256)
def _sorted(file: Any) -> tuple[Any, ...]:
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
def _nested(message: Any, is_proto2: bool) -> tuple[Any, ...]:
    """Lists nested messages without the entries of maps and, for proto2, without groups."""
    groups = {each.message_type.full_name for each in message.fields if is_proto2 and each.type == _GROUP}
    return tuple(
        each
        for each in message.nested_types
        if not each.GetOptions().map_entry and each.full_name not in groups
    )


def _are_usual(paths: Iterable[str]) -> bool:
    """Returns whether protoc can find files under these paths on any disk."""
    folded = [path.casefold() for path in paths]
    folders = {str(folder) for path in folded for folder in PurePosixPath(path).parents}
    return all(map(_is_usual, paths)) and len(set(folded)) == len(folded) and folders.isdisjoint(folded)


def _is_usual(path: str) -> bool:
    """Returns whether a path is that of a file below any folder, on any file system."""
    steps = PurePosixPath(path)
    encoded = path.encode("utf-8", "surrogatepass")
    return not (
        steps.is_absolute()
        or not steps.parts
        or str(steps) != path  # protoc does not normalize paths
        or ".." in steps.parts
        or not path.isprintable()  # neither control characters nor half of a surrogate pair
        or re.search(r'[\\":]', path)
        or len(encoded) > _LONGEST_PATH
        or any(len(step.encode("utf-8", "surrogatepass")) > _LONGEST_STEP for step in steps.parts)
    )


@lru_cache(maxsize=1)
def _included() -> frozenset[str]:
    """Returns the paths of the files of Google's packages, which every client has."""
    return frozenset(
        file.relative_to(folder).as_posix()
        for folder in _include_folders()
        for file in (folder / "google").rglob("*.proto")
    )


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


def _run_protoc(texts: Mapping[str, str], descriptors: Sequence[Any], main: str) -> bytes | str:
    """Returns what protoc makes of some files; text with the reason if it refuses them.

    Args:
        texts: the files that are text, by name.
        descriptors: those that are descriptors.
        main: the name of the file to compile.

    Raises:
        InvalidSchemaError, RetriableError, InvalidOptionError: see `compile_schema`.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    folders = _include_folders()
    try:
        contents = {name: text.encode() for name, text in texts.items()}
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
            given, output = Path(root, "given"), Path(root, "descriptors")
            given.write_bytes(FileDescriptorSet(file=descriptors).SerializeToString())
            packages = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-S", "-E", "-c", _PROTOC, packages]
            command += [f"-I{folder}" for folder in (Path(root, "files"), *folders)]
            command += [f"--descriptor_set_in={given}"] if descriptors else []
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
    reason = done.stderr.decode("utf-8", "replace").replace(f"{root}/files/", "")
    reason = _LOGGED.sub("", reason).strip()
    if done.returncode == _NOT_STARTED:
        raise RetriableError(
            f"protoc cannot be started: {reason}. This says nothing about the schema.", fix=_INSTALL
        )
    if -done.returncode in _OF_MACHINE:
        raise RetriableError(
            f"somebody ended protoc with signal {-done.returncode}. This says nothing about the schema.",
            fix="check whether the machine has enough memory.",
        )
    if done.returncode == _REFUSED:
        return reason or "it says no reason"
    if -done.returncode == signal.SIGXCPU:
        reason = f"it takes more than {_PROTOC_CPU_SECONDS} s of CPU time"
    raise InvalidSchemaError(
        f"protoc refuses the schema (named {main} here): {reason or f'exit status {done.returncode}'}",
        fix="correct the schema",
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
    9: ("bytes", 0),
    12: ("bytes", 0),  # bytes that are not UTF-8 are errors of their rows for a string
    11: ("message", 0),
    10: ("group", 0),
}


def check_readable(writer: Any, reader: Any) -> frozenset[str]:
    """Checks that each field of a writer's message, which the reader's message has too, keeps its value.

    Returns:
        The full names of the reader's fields that keep only some of the writer's numbers.

    Raises:
        InvalidSchemaError: if the reader would skip or change values. It names the field and both types.
    """
    narrowed: set[str] = set()
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
            if _is_narrowed(field, other):
                narrowed.add(other.full_name)
            if field.message_type is not None and other.message_type is not None:
                pair = (field.message_type.full_name, other.message_type.full_name)
                if pair not in seen:
                    seen.add(pair)
                    waiting.append((field.message_type, other.message_type, place))
    return frozenset(narrowed)


def _fits(writer: Any, reader: Any) -> bool:
    (written, bits), (read, room) = _FAMILIES[writer.type], _FAMILIES[reader.type]
    if written != read or (bits, room) == (65, 32):  # the largest of uint64 look like negative ones of int32
        return False
    if writer.is_repeated and not reader.is_repeated:
        return False
    if writer.message_type is not None:
        entries = [each.message_type.GetOptions().map_entry for each in (writer, reader)]
        return bool(entries[0] == entries[1])
    return True


def _is_narrowed(writer: Any, reader: Any) -> bool:
    """Returns whether the writer's type has numbers that the reader's has not; an odd size has no sign."""
    bits, room = _FAMILIES[writer.type][1], _FAMILIES[reader.type][1]
    return bits > room or (bits, room) in ((32, 33), (64, 65), (32, 65))


def describe(field: Any) -> str:
    """Returns the type of a field as a schema writes it."""
    name = field.message_type.full_name if field.message_type is not None else KINDS[field.type].name.lower()
    return f"repeated {name}" if field.is_repeated else name
