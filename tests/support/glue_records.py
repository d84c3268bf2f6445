"""Records that AWS Glue's own serializer 1.1.25 wrote, with the texts that it registered.

`integration/test_glue.py` lets the serializer write them again, and lets it read what this package writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """A record.

    Attributes:
        format: of its schema.
        compression: ``none`` or ``zlib``.
        message: path of the message type in a Protobuf file, as its names.
        payload: what is encoded: JSON, also for Avro, or the bytes of a Protobuf message.
        value: what it means.
        hex: the record.
    """

    format: str
    compression: str
    message: str
    payload: str | bytes
    value: Any
    hex: str

    @property
    def framed(self) -> bytes:
        """The record."""
        return bytes.fromhex(self.hex)


AVRO = (
    '{"type":"record","name":"Flight","namespace":"acme","fields":[{"name":"carrier","type":"string"},'
    '{"name":"minutes","type":["null","int"]}]}'
)
JSON = (
    '{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","properties":'
    '{"carrier":{"type":"string"},"minutes":{"type":"integer"}}}'
)
#: A file, and what the serializer registers for it: maps become messages.
PROTOBUF = """syntax = "proto3";
package acme;
import "google/protobuf/timestamp.proto";
message Zulu { string name = 1; }
message Alpha {
  map<string, int32> counts = 1;
  message Inner { string text = 1; }
  Inner inner = 2;
}
enum Kind { NONE = 0; LATE = 1; }
message Flight {
  string carrier = 1;
  int32 minutes = 2;
  optional int32 gate = 3;
  Kind kind = 4;
  oneof x { string a = 5; int32 b = 6; }
  repeated int32 n = 7;
  map<int64, Inner> m = 8;
  message Inner { bytes b = 1; }
  google.protobuf.Timestamp at = 9;
}
"""
REGISTERED_PROTOBUF = """syntax = "proto3";

package acme;

import "google/protobuf/timestamp.proto";

message Zulu {
  string name = 1;
}

message Alpha {
  repeated .acme.Alpha.CountsEntry counts = 1;

  .acme.Alpha.Inner inner = 2;

  message CountsEntry {
    option map_entry = true;

    string key = 1;

    int32 value = 2;
  }

  message Inner {
    string text = 1;
  }
}

message Flight {
  string carrier = 1;

  int32 minutes = 2;

  .acme.Kind kind = 4;

  repeated int32 n = 7;

  repeated .acme.Flight.MEntry m = 8;

  .google.protobuf.Timestamp at = 9;

  optional int32 gate = 3;

  oneof x {
    string a = 5;
    int32 b = 6;
  }

  message MEntry {
    option map_entry = true;

    int64 key = 1;

    .acme.Flight.Inner value = 2;
  }

  message Inner {
    bytes b = 1;
  }
}

enum Kind {
  NONE = 0;
  LATE = 1;
}
"""
#: Id of the version of each schema in the records.
IDS = {
    "AVRO": "51da8b7d-8ea4-4b66-a716-c279e3097f14",
    "JSON": "b97f209a-8b43-46a3-b093-97af01312350",
    "PROTOBUF": "5477aa65-dd7f-4ead-abec-04e928c34a2a",
}
TEXTS = {"AVRO": AVRO, "JSON": JSON, "PROTOBUF": REGISTERED_PROTOBUF}
RECORDS = (
    Record(
        "AVRO",
        "none",
        "",
        '{"carrier":"LH","minutes":{"int":-7}}',
        {"carrier": "LH", "minutes": -7},
        "030051da8b7d8ea44b66a716c279e3097f14044c48020d",
    ),
    Record(
        "JSON",
        "none",
        "",
        '{"carrier":"LH","minutes":-7}',
        {"carrier": "LH", "minutes": -7},
        "0300b97f209a8b4346a3b09397af013123507b2263617272696572223a224c48222c226d696e75746573223a2d377d",
    ),
    Record(
        "PROTOBUF",
        "none",
        "Flight",
        b"\x0a\x02LH\x10\x07",
        {"carrier": "LH", "minutes": 7},
        "03005477aa65dd7f4eadabec04e928c34a2a030a024c481007",
    ),
    Record(
        "PROTOBUF",
        "none",
        "Zulu",
        b"\x0a\x01z",
        {"name": "z"},
        "03005477aa65dd7f4eadabec04e928c34a2a060a017a",
    ),
    Record(
        "PROTOBUF",
        "none",
        "Alpha.Inner",
        b"\x0a\x01i",
        {"text": "i"},
        "03005477aa65dd7f4eadabec04e928c34a2a020a0169",
    ),
    Record(
        "PROTOBUF",
        "none",
        "Alpha",
        b"\x0a\x05\x0a\x01k\x10\x05\x12\x03\x0a\x01t",
        {"counts": [("k", 5)], "inner": {"text": "t"}},
        "03005477aa65dd7f4eadabec04e928c34a2a000a050a016b100512030a0174",
    ),
    Record(
        "AVRO",
        "zlib",
        "",
        '{"carrier":"LH","minutes":{"int":-7}}',
        {"carrier": "LH", "minutes": -7},
        "030551da8b7d8ea44b66a716c279e3097f14789c63f1f160e20500023200a8",
    ),
    Record(
        "JSON",
        "zlib",
        "",
        '{"carrier":"LH","minutes":-7}',
        {"carrier": "LH", "minutes": -7},
        "0305b97f209a8b4346a3b09397af01312350789cab564a4e2c2aca4c2d52b252f2f150d251cacdcc2b2d492d56b2d235af05008e7f094a",
    ),
    Record(
        "PROTOBUF",
        "zlib",
        "Flight",
        b"\x0a\x02LH\x10\x07",
        {"carrier": "LH", "minutes": 7},
        "03055477aa65dd7f4eadabec04e928c34a2a789c63e662f2f110600700029100bb",
    ),
    Record(
        "PROTOBUF",
        "zlib",
        "Zulu",
        b"\x0a\x01z",
        {"name": "z"},
        "03055477aa65dd7f4eadabec04e928c34a2a789c63e362ac020000b6008c",
    ),
    Record(
        "PROTOBUF",
        "zlib",
        "Alpha.Inner",
        b"\x0a\x01i",
        {"text": "i"},
        "03055477aa65dd7f4eadabec04e928c34a2a789c63e262cc040000950077",
    ),
    Record(
        "PROTOBUF",
        "zlib",
        "Alpha",
        b"\x0a\x05\x0a\x01k\x10\x05\x12\x03\x0a\x01t",
        {"counts": [("k", 5)], "inner": {"text": "t"}},
        "03055477aa65dd7f4eadabec04e928c34a2a789c63e062e562cc16601562e6622c01000609012f",
    ),
)
