"""One range, or many, of Kafka into Arrow: runs in executors' tasks."""
