"""Decodes damaged Protobuf messages and encodes the values again, with a given build of native/protobuf.c.

Usage: python tests/registry/fuzz_protobuf.py LIBRARY FIRST_SEED SEEDS
"""

from __future__ import annotations

import ctypes
import random
import sys

import pyarrow as pa

from kafka_eos_source.registry.protobuf import MessageDecoder
from kafka_eos_source.registry.protobuf_encode import MessageEncoder
from kafka_eos_source.registry.protobuf_program import ProtobufKernel
from kafka_eos_source.registry.protobuf_tree import Kind, build_tree, walk
from tests.registry.protobuf_messages import Types

NUMBERS = (
    Kind.BOOL,
    Kind.INT32,
    Kind.SINT32,
    Kind.UINT32,
    Kind.INT64,
    Kind.UINT64,
    Kind.FIXED32,
    Kind.SFIXED64,
)


def main(path: str, first: str, seeds: str) -> None:
    library = ProtobufKernel(ctypes.CDLL(path))
    errors = 0
    for seed in range(int(first), int(first) + int(seeds)):
        types = Types(seed, ("proto2", "proto3", "editions")[seed % 3])
        rng = random.Random(seed)
        payloads = [None if rng.random() < 0.1 else types.payload() for _ in range(40)]
        payloads += [rng.randbytes(rng.randrange(60)) for _ in range(20)]
        column = pa.array(payloads, rng.choice([pa.binary(), pa.large_binary()])).slice(rng.randrange(3))
        tree = build_tree(types.descriptor)
        numbers = [each.descriptor.full_name for each in walk(tree) if each.kind in NUMBERS]
        narrowed = frozenset(name for name in numbers if seed % 2 and rng.random() < 0.5)
        decoder = MessageDecoder(tree, library, narrowed)
        start = rng.choice([0, 0, 0, 2])
        converted = decoder.decode(column[:20], start)  # the next call reuses its memory
        del converted
        converted = decoder.decode(column, start)
        converted.values.validate(full=True)
        errors += len(converted.errors)
        again = MessageEncoder(tree, converted.values.type, library).encode(converted.values, b"prefix")
        again.values.validate(full=True)
        assert len(again.values) == len(column)
    print(f"{seeds} types, {errors} rows with errors")


if __name__ == "__main__":
    main(*sys.argv[1:])
