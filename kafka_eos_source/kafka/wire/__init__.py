"""A transactional client that speaks Kafka's protocol itself: one producer epoch for each transaction."""

from kafka_eos_source.kafka.wire import kafka_python

kafka_python.install()
