"""The transactional store of KIP-892 on RocksDB. It uses neither Spark nor a Kafka client.

Start with `transactional`, the public class. `staged_map` and `uncommitted` are its half in memory;
`durable`, `records`, `pending` and `commit_rules` its half on disk. `database`, `rocksdb` and `scans` wrap
rocksdict, `folder` and `files` the store's folder. `views`, `reader` and `frozen` are for reading by others.
"""
