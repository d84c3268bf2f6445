"""The code blocks of the pages that are marked with ``run`` work in the order of their page, and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from integration.support import broker
from integration.support.doc_world import World, fill
from integration.support.kafka import Admin
from kafka_eos_source.embedded import EmbeddedKafka
from tests.support.doc_pages import PAGES, Block, blocks

#: Pages that continue with what the blocks of another page left; they run together.
CONTINUES = {"reading-state": "state"}
#: Pages that end with another query than they begin with: `kafka-eos state rescale` has changed its shards.
ENDS_OTHERWISE = {"reading-state"}


def _blocks() -> Iterator[tuple[str, list[Block]]]:
    found = {page.stem: [block for block in blocks(page) if block.runs] for page in PAGES}
    for page, theirs in found.items():
        if theirs and page not in CONTINUES.values():
            yield page, [*found.get(CONTINUES.get(page, ""), []), *theirs]


PARAMETERS = [
    pytest.param(
        each, id=page, marks=[pytest.mark.long] * any(b.mark.detail == "long" for b in each if b.mark)
    )
    for page, each in _blocks()
]


def _filled() -> Iterator[str]:
    """Runs a broker for these tests alone, because pages give topics and applications short names."""
    with EmbeddedKafka(java_options=broker.JAVA_OPTIONS) as kafka:
        fill(kafka.bootstrap_servers, Admin(kafka.bootstrap_servers))
        yield kafka.bootstrap_servers


servers = pytest.fixture(_filled, scope="module", name="servers")
other_servers = pytest.fixture(_filled, scope="module", name="other_servers")


@pytest.mark.parametrize("page", PARAMETERS)
def test_the_blocks_of_a_page_work(
    servers: str, spark: SparkSession, tmp_path: Path, page: list[Block]
) -> None:
    with ExitStack() as end:
        world = World(servers, spark, tmp_path, end)
        for block in page:
            world.execute(block)


@pytest.mark.long
@pytest.mark.parametrize("page", [each for each in PARAMETERS if each.id not in ENDS_OTHERWISE])
def test_the_blocks_of_a_page_can_be_pasted_again(
    other_servers: str, spark: SparkSession, tmp_path: Path, page: list[Block]
) -> None:
    with ExitStack() as end:
        world = World(other_servers, spark, tmp_path, end)
        for block in page:
            world.execute(block)
        world.again = True
        for block in page:
            world.execute(block)
