"""Random Protobuf types and messages, for comparing decoders and encoders with Google's library."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

F = descriptor_pb2.FieldDescriptorProto
SCALARS = [t for t in range(1, 19) if t not in (F.TYPE_GROUP, F.TYPE_MESSAGE, F.TYPE_ENUM)]
PACKABLE = [t for t in SCALARS if t not in (F.TYPE_STRING, F.TYPE_BYTES)]
KEYS = [t for t in SCALARS if t not in (F.TYPE_DOUBLE, F.TYPE_FLOAT, F.TYPE_BYTES)]
WELL_KNOWN = [
    "Timestamp", "Duration", "Struct", "Value", "ListValue", "BoolValue", "BytesValue", "DoubleValue",
    "FloatValue", "Int32Value", "Int64Value", "StringValue", "UInt32Value", "UInt64Value",
]  # fmt: skip
TEXTS = ["", "a", "é", "日本語", "x" * 40, "\0", "true"]


class Types:
    """A random file with a message ``r.Root``.

    Args:
        seed: decides everything.
        syntax: "proto2", "proto3" or "editions".
    """

    def __init__(self, seed: int, syntax: str) -> None:
        self.random = random.Random(seed)
        self.syntax = syntax
        self.names = 0
        self.file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax=syntax)
        if syntax == "editions":
            self.file.edition = descriptor_pb2.EDITION_2023
        pool = descriptor_pool.DescriptorPool()
        for module in (timestamp_pb2, duration_pb2, struct_pb2, wrappers_pb2):
            known = descriptor_pb2.FileDescriptorProto()
            module.DESCRIPTOR.CopyToProto(known)
            pool.Add(known)
            self.file.dependency.append(known.name)
        color = self.file.enum_type.add(name="Color")
        for name, number in (("RED", 0), ("GREEN", 1), ("BLUE", 7), ("MINUS", -3)):
            color.value.add(name=name, number=number)
        self._fill(self.file.message_type.add(name="Root"), ".r.Root", 0)
        pool.Add(self.file)
        self.descriptor = pool.FindMessageTypeByName("r.Root")
        self.message_class = message_factory.GetMessageClass(self.descriptor)

    def _fill(self, message: Any, full_name: str, depth: int) -> None:
        rng = self.random
        numbers = rng.sample([*range(1, 40), 1022, 1024, 5000, 2**29 - 1], rng.randint(0 if depth else 1, 7))
        oneof = None
        for index, number in enumerate(numbers):
            field = message.field.add(name=f"f{index}", number=number)
            shape = rng.choice(["single", "single", "repeated", "map", "oneof"])
            if shape == "map":
                self._map(message, full_name, field, depth)
                continue
            self._type(message, full_name, field, depth)
            field.label = F.LABEL_REPEATED if shape == "repeated" else F.LABEL_OPTIONAL
            if shape == "oneof" and field.type != F.TYPE_GROUP:
                if oneof is None:
                    oneof = len(message.oneof_decl)
                    message.oneof_decl.add(name="choice")
                field.oneof_index = oneof
            elif shape == "single":
                self._presence(field)
            elif shape == "repeated" and self.syntax != "editions" and field.type in PACKABLE:
                field.options.packed = rng.random() < 0.5

    def _count(self) -> int:
        self.names += 1
        return self.names

    def _presence(self, field: Any) -> None:
        rng = self.random
        if self.syntax == "proto2" and rng.random() < 0.15:
            field.label = F.LABEL_REQUIRED
        if self.syntax != "proto3" and field.type != F.TYPE_GROUP and rng.random() < 0.4:
            if field.type == F.TYPE_STRING:
                field.default_value = "häh"
            elif field.type == F.TYPE_BYTES:
                field.default_value = "\\001\\377"
            elif field.type == F.TYPE_ENUM:
                field.default_value = "BLUE"
            elif field.type == F.TYPE_BOOL:
                field.default_value = "true"
            elif field.type in SCALARS:
                field.default_value = "7"

    def _type(self, message: Any, full_name: str, field: Any, depth: int) -> None:
        rng = self.random
        kind = rng.choice(["scalar", "scalar", "scalar", "enum", "message", "known", "group"])
        if kind == "group" and self.syntax == "proto2" and depth < 3:
            name = f"G{self._count()}"
            self._fill(message.nested_type.add(name=name), f"{full_name}.{name}", depth + 1)
            field.type, field.type_name, field.name = F.TYPE_GROUP, f"{full_name}.{name}", name.lower()
        elif kind == "message" and depth < 3:
            name = f"M{self._count()}"
            self._fill(message.nested_type.add(name=name), f"{full_name}.{name}", depth + 1)
            field.type, field.type_name = F.TYPE_MESSAGE, f"{full_name}.{name}"
        elif kind == "known":
            field.type, field.type_name = F.TYPE_MESSAGE, f".google.protobuf.{rng.choice(WELL_KNOWN)}"
        elif kind == "enum":
            field.type, field.type_name = F.TYPE_ENUM, ".r.Color"
        else:
            field.type = rng.choice(SCALARS)

    def _map(self, message: Any, full_name: str, field: Any, depth: int) -> None:
        name = f"F{field.name[1:]}Entry"
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        key = entry.field.add(name="key", number=1, label=F.LABEL_OPTIONAL)
        key.type = self.random.choice(KEYS)
        value = entry.field.add(name="value", number=2, label=F.LABEL_OPTIONAL)
        self._type(message, full_name, value, depth)
        if value.type == F.TYPE_GROUP:
            value.type = F.TYPE_MESSAGE
        value.name = "value"
        field.label, field.type = F.LABEL_REPEATED, F.TYPE_MESSAGE
        field.type_name = f"{full_name}.{name}"

    def message(self) -> Any:
        """Returns a random message; some have values that are refused."""
        message = self.message_class()
        self._set(message, 0)
        return message

    def _set(self, message: Any, depth: int) -> None:
        rng = self.random
        for field in message.DESCRIPTOR.fields:
            if rng.random() < 0.3 and not field.is_required:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                target = getattr(message, field.name)
                key, value = (
                    field.message_type.fields_by_name["key"],
                    field.message_type.fields_by_name["value"],
                )
                for _ in range(rng.randint(0, 3)):
                    if value.message_type is not None:
                        self._set_message(target[self._scalar(key)], depth)
                    else:
                        target[self._scalar(key)] = self._scalar(value)
            elif field.is_repeated:
                target = getattr(message, field.name)
                for _ in range(rng.choice([0, 1, 2, 3, 20])):
                    if field.message_type is not None:
                        self._set_message(target.add(), depth)
                    else:
                        target.append(self._scalar(field))
            elif field.message_type is not None:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self._set_message(inner, depth)
            else:
                setattr(message, field.name, self._scalar(field))

    def _set_message(self, message: Any, depth: int) -> None:
        rng = self.random
        name = message.DESCRIPTOR.full_name
        if name == "google.protobuf.Timestamp":
            message.seconds = rng.choice([0, 1, -1, 1700000000, -62135596800, 253402300799])
            message.nanos = rng.choice([0, 1, 999, 1000, 999999999])
        elif name == "google.protobuf.Duration":
            message.seconds = rng.choice([0, 5, 315576000000])
            message.nanos = rng.choice([0, 1, 999, 1999, 999999999])
            if rng.random() < 0.4:
                message.seconds, message.nanos = -message.seconds, -message.nanos
        elif name == "google.protobuf.Value":
            message.MergeFromString(self._json_value(0).SerializeToString())
        elif name == "google.protobuf.Struct":
            for _ in range(rng.randint(0, 2)):
                message.fields[rng.choice(TEXTS)].MergeFromString(self._json_value(0).SerializeToString())
        elif name == "google.protobuf.ListValue":
            for _ in range(rng.randint(0, 2)):
                message.values.add().MergeFromString(self._json_value(0).SerializeToString())
        else:
            self._set(message, depth + 1)

    def _json_value(self, depth: int) -> Any:
        rng = self.random
        value = struct_pb2.Value()
        kind = rng.randint(0, 4 if depth > 1 else 5)
        if kind == 0:
            value.null_value = 0
        elif kind == 1:
            value.number_value = rng.choice([0, 1, -1.5, 1e300])
        elif kind in (2, 3):
            value.string_value = rng.choice(TEXTS)
        elif kind == 4:
            value.bool_value = rng.random() < 0.5
        else:
            value.struct_value.fields["k"].CopyFrom(self._json_value(depth + 1))
        return value

    def _scalar(self, field: Any) -> Any:
        rng = self.random
        kind = field.type
        if kind == F.TYPE_STRING:
            return rng.choice(TEXTS)
        if kind == F.TYPE_BYTES:
            return rng.choice([b"", b"\xff", b"abc", b"\0" * 20])
        if kind == F.TYPE_BOOL:
            return rng.random() < 0.5
        if kind == F.TYPE_ENUM:
            numbers = [0, 1, 7, -3] + ([99] if not field.enum_type.is_closed else [])
            return rng.choice(numbers)
        if kind in (F.TYPE_FLOAT, F.TYPE_DOUBLE):
            return rng.choice([0.0, -0.0, 1.5, -2.25, float("inf"), float("nan"), 65504.0])
        bits = (
            32
            if kind in (F.TYPE_INT32, F.TYPE_UINT32, F.TYPE_SINT32, F.TYPE_FIXED32, F.TYPE_SFIXED32)
            else 64
        )
        if kind in (F.TYPE_UINT32, F.TYPE_UINT64, F.TYPE_FIXED32, F.TYPE_FIXED64):
            return rng.choice([0, 1, 127, 128, 2**bits - 1, 2 ** (bits - 1)])
        return rng.choice([0, 1, -1, 300, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))])

    def payload(self) -> bytes:
        """Returns the bytes of a message, often of two one after the other, sometimes damaged."""
        rng = self.random
        whole: bytes = self.message().SerializeToString()
        if rng.random() < 0.4:
            whole += self.message().SerializeToString()
        if rng.random() < 0.1:  # field 1023, which is unknown, once as a group
            whole += b"\xf8\x3f\x05" + b"\xfb\x3f\x08\x01\x13\x14\xfc\x3f" + b"\xfa\x3f\x02hi"
        if rng.random() < 0.35 and whole:
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 1, 3])):
                damaged[rng.randrange(len(damaged))] = rng.choice(
                    [0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)]
                )
            whole = bytes(damaged)
        if rng.random() < 0.1:
            whole = whole[: rng.randint(0, len(whole))]
        return whole


def plain(array: pa.Array) -> list[Any]:
    """Returns values that can be compared: maps are sorted, and NaN equals itself."""
    return [_plain(each, array.type) for each in array.to_pylist()]


def _plain(value: Any, arrow_type: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(arrow_type):
        pairs = [(key, _plain(each, arrow_type.item_type)) for key, each in value]
        return sorted(pairs, key=lambda pair: repr(pair[0]))
    if pa.types.is_list(arrow_type):
        return [_plain(each, arrow_type.value_type) for each in value]
    if pa.types.is_struct(arrow_type):
        return {field.name: _plain(value[field.name], field.type) for field in arrow_type}
    return repr(value) if isinstance(value, float) else value
