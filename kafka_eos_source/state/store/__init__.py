"""The transactional store of KIP-892, on RocksDB. It knows nothing of Spark, and of Kafka only offsets."""
