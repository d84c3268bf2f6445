"""Codecs never make a column that takes more memory than they are told, whatever the bytes ask for."""

from __future__ import annotations

import ctypes
import functools
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kafka_eos_source import native
from kafka_eos_source.documents.converted import Converted, slices
from kafka_eos_source.registry import avro as avro_decode
from kafka_eos_source.registry import avro as avro_kernel
from kafka_eos_source.registry import json_schema
from kafka_eos_source.registry import protobuf as protobuf_decode
from kafka_eos_source.registry import protobuf_program as protobuf_kernel
from kafka_eos_source.registry.avro import AvroDecoder, AvroEncoder, AvroKernel, ColumnBuffers
from kafka_eos_source.registry.avro_decode import compile_program
from kafka_eos_source.registry.avro_encode import compile_encoder
from kafka_eos_source.registry.avro_schema import parse
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf import MessageDecoder
from kafka_eos_source.registry.protobuf_encode import MessageEncoder
from kafka_eos_source.registry.protobuf_schema import message_at
from kafka_eos_source.registry.protobuf_tree import build_tree
from tests.registry.avro_model import schema_of

MIB = 1 << 20
LIMIT = MIB


def record(*fields: dict[str, Any], name: str = "M") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


WIDE = record(*({"name": f"f{n}", "type": ["null", "string"], "default": None} for n in range(50)), name="W")
AVRO = {"type": "array", "items": record({"name": "x", "type": "int"}, name="W")}
AVRO_WIDE = {"type": "array", "items": {**WIDE, "fields": [{"name": "x", "type": "int"}, *WIDE["fields"]]}}

FIELDS = " ".join(f"optional string f{n} = {n + 2};" for n in range(50))
PROTO = Schema(
    "PROTOBUF",
    f"""syntax = "proto3";
    message M {{
      enum Name {{ {"VERY_" * 12}LONG_NAME = 0; SHORT = 1; }}
      repeated W w = 1; repeated Name names = 2; repeated uint64 numbers = 3; repeated Empty nothing = 4;
      repeated string texts = 5;
    }}
    message W {{ int32 x = 1; {FIELDS} }}
    message Empty {{}}""",
)
JSON = Schema(
    "JSON",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "w": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {f"f{n}": {"type": ["integer", "null"]} for n in range(50)},
                    },
                }
            },
        }
    ),
)


@functools.cache
def avro_library(largest_offset: int | None = None) -> AvroKernel:
    if largest_offset is None:
        return avro_kernel.kernel()
    return AvroKernel(ctypes.CDLL(str(_compiled("avro", largest_offset))))


@functools.cache
def protobuf_library(largest_offset: int | None = None) -> protobuf_kernel.ProtobufKernel:
    if largest_offset is None:
        return protobuf_kernel.kernel()
    return protobuf_kernel.ProtobufKernel(ctypes.CDLL(str(_compiled("protobuf", largest_offset))))


_folder: list[Path] = []
_pools: list[pa.MemoryPool] = []  # arrays need theirs for as long as they exist


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _folder[:] = [tmp_path_factory.mktemp("libraries")]


def _compiled(name: str, largest_offset: int) -> Path:
    """Builds a library for which the largest offset of Arrow is a smaller number."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = _folder[0] / f"{name}-{largest_offset}.so"
    source = Path(native.__file__).with_name(f"{name}.c")
    flags = ["-O1", "-fPIC", "-shared", f"-DKAFKA_EOS_LARGEST_OFFSET={largest_offset}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return library


def avro_decoder(library: AvroKernel) -> AvroDecoder:
    return AvroDecoder(compile_program(parse(schema_of(AVRO)), parse(schema_of(AVRO_WIDE))), library)


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def avro_items(count: int) -> bytes:
    """An array of `count` items, each of one byte, which become 50 columns."""
    return varint(2 * count) + b"\2" * count + b"\0" if count else b"\0"


def proto_items(count: int) -> bytes:
    return b"\x0a\x00" * count


def json_items(count: int) -> bytes:
    return b'{"w":[' + b",".join([b"{}"] * count) + b"]}"


Measure = Callable[[], int]


@pytest.fixture
def capacities(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the buffers of each call of a C library allocated."""
    found: list[int] = []
    memory_of_avro, result_of_protobuf = avro_decode.Memory, protobuf_decode._Result

    def avro_memory(*given: Any) -> Any:
        memory = memory_of_avro(*given)
        parts = [
            part for each in memory.columns(ColumnBuffers) for part in (each.validity, each.values, each.heap)
        ]
        found.append(sum(part.capacity for part in parts))
        return memory

    def protobuf_result(*given: Any) -> Any:
        result = result_of_protobuf(*given)
        parts = ("validity", "values", "offsets", "entry_offsets", "data", "dropped")
        found.append(sum(column[name][2] for column in result._columns for name in parts))
        return result

    monkeypatch.setattr(avro_decode, "Memory", avro_memory)
    monkeypatch.setattr(protobuf_decode, "_Result", protobuf_result)
    return found


def decoders() -> dict[str, tuple[Any, Callable[[int], bytes]]]:
    tree = build_tree(message_at(PROTO, (0,)))
    return {
        "avro": (avro_decoder(avro_library()), avro_items),
        "protobuf": (MessageDecoder(tree, protobuf_library()), proto_items),
        "json": (json_schema.decoder(JSON), json_items),
    }


@pytest.mark.parametrize("name", ["avro", "protobuf", "json"])
def test_small_messages_that_become_large_are_decoded_in_slices(name: str, capacities: list[int]) -> None:
    """Together, the messages take many times the limit. One of them takes more than that by itself."""
    made, items = decoders()[name]
    rng = random.Random(1)
    counts = [rng.choice([0, 1, 100, 500]) for _ in range(60)]
    counts[33] = 10_000
    payloads: list[bytes | None] = [items(count) for count in counts]
    payloads[5] = None
    column = pa.array(payloads, pa.binary())
    whole = [None if n in (5, 33) else count for n, count in enumerate(counts)]
    found = list(slices(lambda part: made.decode(part, 0, LIMIT), column, "decoded"))
    assert len(found) > 4
    seen: list[Any] = []
    for part in found:
        part.values.validate(full=True)
        assert part.values.nbytes <= LIMIT
        lists = part.values if pa.types.is_list(part.values.type) else part.values.field("w")
        lengths = pc.list_value_length(lists)
        seen += pc.if_else(part.values.is_valid(), lengths, None).to_pylist()
    assert seen == whole
    (bad,) = [part for part in found if part.errors]
    assert len(bad.values) == 1
    assert max(capacities, default=0) <= LIMIT


@pytest.mark.parametrize(
    "payload",
    [
        b"\x12" + varint(100_000) + b"\0" * 100_000,  # packed enums: a byte each, and a name of 69
        b"\x1a" + varint(200_000) + b"\1" * 200_000,  # packed uint64: a byte each, and a decimal of 16
        b"\x22\0" * 700_000,  # empty messages
        b"\x2a\0" * 700_000,  # empty strings
        b"\x2a" + varint(3 * MIB) + b"x" * 3 * MIB,
    ],
    ids=["enum", "uint64", "empty messages", "empty strings", "one long string"],
)
def test_what_python_makes_of_values_counts(payload: bytes, capacities: list[int]) -> None:
    made = MessageDecoder(build_tree(message_at(PROTO, (0,))), protobuf_library())
    column = pa.array([payload[:0], payload, None, payload[:0]])
    alone = made.decode(pa.array([payload]), 0)
    taken = alone.values.nbytes
    for limit in (taken - 1, 16 * taken):
        capacities.clear()
        found = list(slices(lambda part, limit=limit: made.decode(part, 0, limit), column, "decoded"))  # type: ignore[misc]
        assert max(part.values.nbytes for part in found) <= limit
        assert max(capacities) <= limit
        rows = [valid for part in found for valid in part.values.is_valid().to_pylist()]
        assert rows == [True, limit > taken, False, True]


def test_json_documents_take_a_bounded_amount_of_memory() -> None:
    """Arrow's own pool says what the parser needed at most."""
    made = json_schema.decoder(JSON)
    column = pa.array([json_items(1000)] * 60)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    _pools.append(pool)
    pa.set_memory_pool(pool)
    try:
        found = list(slices(lambda part: made.decode(part, 0, LIMIT), column, "decoded"))
        peak = pool.max_memory()
    finally:
        kept = sum(part.values.nbytes for part in found)
        pa.set_memory_pool(before)
    assert sum(len(part.values) for part in found) == 60
    assert peak - kept < 4 * LIMIT


@pytest.mark.parametrize("largest", [100, 1000])
def test_offsets_never_overflow(largest: int) -> None:
    """With libraries for which the largest offset is small, as 2 GiB are for the real ones."""
    avro = avro_decoder(avro_library(largest))
    proto = MessageDecoder(build_tree(message_at(PROTO, (0,))), protobuf_library(largest))
    rng = random.Random(largest)
    counts = [rng.randrange(60) for _ in range(50)]
    counts[20] = largest + 1
    texts = b"".join(b"\x2a" + varint(n) + b"x" * n for n in (largest, 1))
    for made, items in ((avro, avro_items), (proto, proto_items)):
        column = pa.array([items(count) for count in counts])
        found = list(slices(lambda part, made=made: made.decode(part, 0), column, "decoded"))  # type: ignore[misc]
        rows: list[Any] = []
        for part in found:
            part.values.validate(full=True)
            lists = part.values if pa.types.is_list(part.values.type) else part.values.field("w")
            assert len(lists.values) <= largest
            rows += pc.if_else(part.values.is_valid(), pc.list_value_length(lists), None).to_pylist()
        assert rows == [None if n == 20 else count for n, count in enumerate(counts)]
    assert len(proto.decode(pa.array([texts]), 0).values) == 0


def _encoded(encoder: Any, values: pa.Array, **limit: int) -> list[Converted]:
    found = list(slices(lambda part: encoder.encode(part, b"prefix", **limit), values, "encoded"))
    for part in found:
        part.values.validate(full=True)
    return found


@pytest.mark.parametrize("kind", ["avro", "protobuf"])
def test_encoded_columns_are_split_before_their_offsets_overflow(kind: str) -> None:
    values = pa.array([{"s": "x" * (n % 40)} for n in range(200)], pa.struct([("s", pa.string())]))
    values = pa.concat_arrays([values[:90], pa.array([{"s": "y" * 2000}, None], values.type), values[90:]])

    def encoder(largest: int | None) -> Any:
        if kind == "avro":
            program = compile_encoder(parse(schema_of(record({"name": "s", "type": "string"}))), values.type)
            return AvroEncoder(program, avro_library(largest))
        tree = build_tree(
            message_at(Schema("PROTOBUF", 'syntax = "proto3"; message M { string s = 1; }'), (0,))
        )
        return MessageEncoder(tree, values.type, protobuf_library(largest))

    whole = encoder(None).encode(values, b"prefix").values.to_pylist()
    assert whole[91] is None
    wanted = [None if row == 90 else each for row, each in enumerate(whole)]
    by_offset = _encoded(encoder(500), values)
    by_limit = _encoded(encoder(None), values, most_bytes=1024)
    for found in (by_offset, by_limit):
        assert len(found) > 4
        assert [each for part in found for each in part.values.to_pylist()] == wanted
        assert [part.errors for part in found if part.errors] == [
            {0: "the record takes more than 256 MiB when it is encoded"}
        ]
    assert max(part.values.buffers()[2].size for part in by_offset) <= 500
    assert max(part.values.buffers()[2].size for part in by_limit) <= 1024


def test_json_documents_are_encoded_in_slices() -> None:
    schema = Schema("JSON", json.dumps({"type": "object", "properties": {"s": {"type": "string"}}}))
    values = pa.array([{"s": "x" * (n % 40)} for n in range(200)], pa.struct([("s", pa.string())]))
    made = json_schema.encoder(schema, values.type)
    found = _encoded(made, values, most_bytes=1024)
    assert [each for part in found for each in part.values.to_pylist()] == made.encode(
        values, b"prefix"
    ).values.to_pylist()
    assert max(sum(map(len, part.values.to_pylist())) for part in found) <= 1024
