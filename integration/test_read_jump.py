"""After a checkpoint was restored, the source jumps to the offsets that the query committed in Kafka."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from integration.support.kafka import produce, read_back, values
from integration.support.query import Query

pytestmark = pytest.mark.skipif(pyspark.__version__ < "4.2", reason="a source jumps since PySpark 4.2")


def rows(first: int, end: int) -> list[str]:
    return [f"{row:05d}" for row in range(first, end)]


@pytest.fixture
def query(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Query:
    return Query(spark, broker, topic(2), topic(2), checkpoint)


class Restored:
    """Runs a query and replaces its checkpoint with an earlier copy."""

    def __init__(self, query: Query, folder: Path) -> None:
        self.query = query
        self._copy = folder / "copy"
        self._own = {"application.id": f"app-{query.sink}"}

    def run(self, *topics: str, of_source: bool = True, **limits: str) -> None:
        own = {**self._own, "onRolledBackCheckpoint": "jump"} if of_source else {}
        frames = [self.query.frame(each, **own, **limits) for each in topics or (self.query.source,)]
        frame = frames[0]
        for each in frames[1:]:
            frame = frame.unionByName(each)
        self.query.run(frame, application__id=self._own["application.id"])

    def copy(self) -> None:
        shutil.copytree(self.query.checkpoint, self._copy)

    def restore(self) -> None:
        shutil.rmtree(self.query.checkpoint)
        shutil.copytree(self._copy, self.query.checkpoint)

    def jumps(self) -> list[bool]:
        """Returns whether the first source jumped, for each entry in Spark's offset log."""
        log = Path(self.query.checkpoint, "offsets")
        numbers = sorted(int(each.name) for each in log.iterdir() if each.name.isdecimal())
        lines = [(log / str(number)).read_text().splitlines() for number in numbers]
        return [json.loads(each[2])["@"].get("jump", False) for each in lines]


@pytest.mark.core
def test_available_now_reads_the_records_after_the_jump(query: Query, broker: str, tmp_path: Path) -> None:
    restored = Restored(query, tmp_path)
    produce(broker, query.source, rows(0, 50))
    restored.run()
    restored.copy()
    produce(broker, query.source, rows(50, 250))
    restored.run(maxOffsetsPerTrigger="80")
    restored.restore()
    produce(broker, query.source, rows(250, 300))
    restored.run(maxOffsetsPerTrigger="30")
    assert values(read_back(broker, query.sink)) == rows(0, 300)
    assert restored.jumps() == [False, True, False, False]
    restored.run()
    assert restored.jumps() == [False, True, False, False], (
        "the checkpoint has caught up, so the source must not jump again"
    )


def test_without_the_option_the_sink_refuses_the_old_checkpoint(
    query: Query, broker: str, tmp_path: Path
) -> None:
    """Without a jump, a batch that was committed only in part is refused: neither written nor skipped."""
    restored = Restored(query, tmp_path)
    produce(broker, query.source, rows(0, 50))
    restored.run()
    restored.copy()
    produce(broker, query.source, rows(50, 250))
    restored.run()
    restored.restore()
    produce(broker, query.source, rows(250, 285))
    with pytest.raises(PySparkException, match="CHECKPOINT_ROLLED_BACK"):
        restored.run(of_source=False, maxOffsetsPerTrigger="30")
    assert values(read_back(broker, query.sink)) == rows(0, 250)


def test_two_sources_jump_in_one_batch(
    query: Query, broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    second = topic(1)
    restored = Restored(query, tmp_path)
    produce(broker, query.source, rows(0, 50))
    produce(broker, second, rows(1000, 1010))
    restored.run(query.source, second)
    restored.copy()
    for first in (50, 100):
        produce(broker, query.source, rows(first, first + 50))
        produce(broker, second, rows(1000 + first, 1050 + first))
        restored.run(query.source, second)
    restored.restore()
    produce(broker, second, rows(2000, 2010))  # only this source has new records after its jump
    restored.run(query.source, second)
    expected = rows(0, 150) + rows(1000, 1010) + rows(1050, 1150) + rows(2000, 2010)
    assert values(read_back(broker, query.sink)) == expected
    assert restored.jumps()[:2] == [False, True]
