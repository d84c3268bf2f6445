"""T53, T146 to T149: a run of hours under random faults, judged in chunks; ``./dev soak MINUTES``.

Three brokers behind proxies, one Spark driver with four queries, and two processes of
`integration.chaos.loop` with one query each, all of which read one source topic. While `faults` kills, pauses
and cuts off what it finds, the queries commit as fast as they can. Every few minutes `conductor` closes a
chunk: the faults and the input stop, all queries come to rest, and `judge` compares everything that the chunk
wrote with what its input implies. Then the chunk is deleted, so a run needs the same memory and disk after
hours as after minutes.

================  =====================================================================================
`workload`        the queries, their input and what they must write
`judge`           compares one chunk with its input; carries positions and totals to the next chunk
`conductor`       runs the chunks: feed, inject, come to rest, judge, delete
`cluster`         the brokers and proxies
`hosts`           keeps driver processes running, as a job scheduler does
`spark_driver`    the program of the Spark driver
`faults`          the faults, and when each is injected
`feeder`          writes the input
`readers`         reads a chunk: Kafka's Java consumer, librdkafka, the sinks, the state
`watch`           follows the checkpoints: batches, stalls, recoveries
`samples`         memory, file descriptors and threads of each process, and their slopes
`folder`          what a run keeps on disk, from which it resumes
`report`          the report of a run, as Markdown and JSON
================  =====================================================================================
"""
