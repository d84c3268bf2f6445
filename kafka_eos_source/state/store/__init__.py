"""The transactional store of KIP-892 on RocksDB. It uses neither Spark nor a Kafka client.

Start with `transactional`, the public class. `uncommitted` is its half in memory, with `overlay`; `durable`
its half on disk. `opening` opens its folder, `database`, `rocksdb` and `files` wrap rocksdict and RocksDB's
files. `views` is for reading by others.
"""
