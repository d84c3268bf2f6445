"""Fixtures and helpers of the integration tests.

Fixtures
========

=====================  ==================================================================================
``broker``             ``str``: bootstrap servers of the session's Kafka (``KAFKA_BOOTSTRAP``, else a
                       container if a container engine answers, else embedded); no automatic topic creation
``broker_kind``        ``"external"``, ``"container"`` or ``"embedded"``
``admin``              `kafka.Admin` of ``broker``
``topic``              ``topic(partitions=1, **config)`` creates a topic with a unique name
``other_cluster``      ``str``: bootstrap servers of a second cluster, embedded
``fresh_cluster``      ``fresh_cluster(number=1, **arguments of EmbeddedKafka)`` starts a cluster for tests
                       that kill, pause or restart brokers (``kill_node(id)``, ``pause_node``, ...)
``secured_cluster``    `security.SecuredCluster`: SASL/PLAIN and ACLs, users ``admin`` (may do everything)
                       and ``alice`` (what ``allow("alice", "topic", name, "READ")`` allows);
                       ``options("alice")`` for the source and the sink, ``login`` for librdkafka
``spark``              the session's ``SparkSession``, local[2]
``driver``             ``driver(spec, failpoints="")`` starts a Spark driver in a separate process
``checkpoint``         ``str``: a checkpoint path for this test alone
=====================  ==================================================================================

A `driver.Driver` runs a query that is described as data (see the module). ``finish()`` waits until it ends
and fails unless it succeeded; ``wait()`` returns its exit code; ``kill()`` sends SIGKILL to the script, its
JVM and its Python workers; ``await_text(text)`` waits for a text in its log; ``result()`` returns what it
reported.

Helpers
=======

- `kafka`: topics, groups, records and transactions, without the product: ``Admin``, ``produce``,
  ``transaction``, ``read_back(bootstrap, *topics, committed=True)``, ``values``, ``end_offsets``.
- `checkpoint`: ``SparkCheckpoint`` writes a checkpoint's files as Spark does, without Spark.
- `reading`: ``Topics`` and ``Reader``, for tests of the source.
- `tools`: Kafka's own command line tools: ``console_consumer``, ``transactions``,
  ``describe_transaction``, ``producers``, ``hanging_transactions``, ``abort_transaction``.
- `processes`: ``await_condition(condition, seconds, what)``. Every process that a run starts carries a mark
  in its environment; the run fails if one is still alive at the end.
"""
