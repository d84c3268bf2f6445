"""The versions of all peers."""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.embedded.java import JarSet

#: The first Kafka Streams with transactional state stores (KIP-892).
STREAMS_VERSION = "4.4.0"
STREAMS = JarSet(
    "kafka-streams",
    (("org.apache.kafka", "kafka-streams", STREAMS_VERSION), ("org.slf4j", "slf4j-simple", "1.7.36")),
    11,
    version=STREAMS_VERSION,
)

QUIX_VERSION = "3.28.1"
QUIX = (f"quixstreams=={QUIX_VERSION}",)

#: The newest Spark whose Kafka connector is published with all of its dependencies.
SPARK_VERSION = "4.2.0"
SPARK = (
    f"pyspark=={SPARK_VERSION}",
    "pandas>=2.2,<3",
    "pyarrow>=15",
    "protobuf>=5",  # transformWithState needs it in Python workers
)
#: Jars are listed one by one, because the token provider of that version is not available; the connector also
#: works with the one of 4.0.0.
SPARK_KAFKA = JarSet(
    "spark-kafka",
    (
        ("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK_VERSION),
        ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
        ("org.apache.kafka", "kafka-clients", "3.9.1"),
        ("org.apache.commons", "commons-pool2", "2.12.1"),
    ),
    4,
    version=SPARK_VERSION,
    transitive=False,
    sums=Path(__file__).with_name("jars.sha256"),
)
