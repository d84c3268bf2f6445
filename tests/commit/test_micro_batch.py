"""What a commit tells about a batch before it contacts a broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafka_eos_source.commit.identity_file import Identity, IdentityFile
from kafka_eos_source.commit.micro_batch import commit_micro_batch
from kafka_eos_source.errors import OperatorError
from kafka_eos_source.observe.journal import newest_batch
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.offset_log import PlannedBatch
from kafka_eos_source.stage.files import StagingFolder


def test_a_batch_whose_checkpoint_is_refused_is_shown_with_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source, if it has no application.id, is found by these positions."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": "query"}))
    entry = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1}\n{"a":{"0":7},"@":{"start":{"a":{"0":3}}}}'
    (checkpoint / "offsets" / "0").write_text(entry)
    elsewhere = Identity("app", "query", 0, "file:/another/place")
    IdentityFile(str(checkpoint), elsewhere).write()
    options = parse_write(
        {
            "kafka.bootstrap.servers": "localhost:1",
            "topic": "out",
            "application.id": "app",
            "checkpointLocation": str(checkpoint),
        },
        streaming=True,
    )
    logged = offset_log.read(str(checkpoint), 0)
    assert logged is not None
    planned = {PlannedBatch(0, logged.digest)}
    with pytest.raises(OperatorError, match="another/place"):
        commit_micro_batch(options, StagingFolder.at(str(tmp_path / "staging")), [], 0, planned=planned)
    failed = newest_batch("app")
    assert failed is not None
    assert [dict(each.offsets) for each in failed.sources] == [{"a": 4}]
