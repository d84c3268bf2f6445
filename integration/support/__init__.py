"""What the integration tests stand on.

Fixtures
========

=====================  ==================================================================================
``broker``             ``str``: bootstrap servers of the session's Kafka (``KAFKA_BOOTSTRAP``, else a
                       container where an engine answers, else embedded); topics are not made by writing
``broker_kind``        ``"external"``, ``"container"`` or ``"embedded"``
``admin``              `kafka.Admin` of ``broker``
``topic``              ``topic(partitions=1, **config)`` makes a topic with a name of its own
``other_cluster``      ``str``: bootstrap servers of a second cluster, embedded
``fresh_cluster``      ``fresh_cluster(number=1, **EmbeddedKafka's arguments)``: for tests that kill,
                       pause or restart brokers: ``kill_node(id)``, ``pause_node``, ``start_node``, ...
``secured_cluster``    `security.SecuredCluster`: SASL/PLAIN and ACLs, users ``admin`` (may do everything)
                       and ``alice`` (what ``allow("alice", "topic", name, "READ")`` allows);
                       ``options("alice")`` for the source and the sink, ``login`` for librdkafka
``spark``              the session's ``SparkSession``, local[2]
``driver``             ``driver(spec, failpoints="")`` starts a Spark driver in a process of its own
``checkpoint``         ``str``: a path of this test's own
=====================  ==================================================================================

A `driver.Driver` runs a query that is described as data (see the module); ``finish()`` waits for its good
end, ``wait()`` for any; ``kill()`` is SIGKILL to the script, its JVM and its Python workers;
``await_text(text)`` looks at its log, ``result()`` is what it left.

Helpers
=======

- `kafka`: topics, groups, records and transactions through confluent-kafka alone: ``Admin``, ``produce``,
  ``transaction``, ``read_back(bootstrap, *topics, committed=True)``, ``values``, ``end_offsets``.
- `checkpoint`: ``MadeUp``, the files that Spark leaves in a checkpoint, without Spark.
- `reading`: ``Topics`` and ``Reader``, for tests of the source.
- `tools`: Kafka's own command line tools: ``console_consumer``, ``transactions``,
  ``describe_transaction``, ``producers``, ``hanging_transactions``, ``abort_transaction``.
- `processes`: ``await_condition(condition, seconds, what)``; every process that a run starts carries a mark
  in its environment, and none is left when the run ends.
"""
