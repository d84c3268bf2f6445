"""Clients that speak Kafka's protocol themselves.

The producer writes transactions, with an epoch for each (KIP-890). The consumer reads ranges of offsets.
"""

from kafka_eos_source.kafka.wire import kafka_python

kafka_python.install()
