"""The Avro codec gives what Spark's from_avro gives."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


def test_random_records_are_read_as_by_from_avro() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "integration.support.avro_in_spark", "150"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["equal"] > 75, seen
