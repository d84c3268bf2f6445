"""What the integration tests stand on.

======================  =================================================================================
fixture                 what it is
======================  =================================================================================
``broker``              bootstrap servers of the session's Kafka (``KAFKA_BOOTSTRAP``, container, embedded)
``topic``               ``topic(partitions=1, **config)`` makes a topic with a name of its own
``spark``               the session's SparkSession, local[2]
``other_cluster``       bootstrap servers of a second, embedded cluster
``secured``             an embedded cluster with SASL and ACLs
``driver``              ``driver(spec, failpoints="")`` starts a Spark driver in a process of its own
======================  =================================================================================

`support.kafka` produces and reads back with confluent-kafka alone; `support.tools` runs Kafka's own tools.
"""
