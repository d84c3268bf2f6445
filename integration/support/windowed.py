"""Runs the windowed queries of ``examples/`` in one driver: ``… integration.support.windowed SPEC.json``.

A spec is ``{"applications": [fields of examples.page_views.Application, …], "flights": file of a demo's spec,
"offsets_per_trigger": 40}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples import flight_delays, page_views
from integration.support.driver import end_with_parent
from integration.support.session import builder
from kafka_eos_source.demo.query import Spec, await_reading


def main(path: str) -> None:
    end_with_parent()
    spec = json.loads(Path(path).read_text())
    spark = builder().getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    reading = {"maxOffsetsPerTrigger": str(spec["offsets_per_trigger"])}
    queries = []
    for fields in spec["applications"]:
        application = page_views.Application(**{**fields, "folder": Path(fields["folder"])})
        queries.append(application.start(spark, reading=reading, availableNow=True))
        await_reading(queries[-1])
    queries.append(flight_delays.start(spark, Spec.read(Path(spec["flights"]))))
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
