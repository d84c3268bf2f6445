"""The checks of ``kafka-eos doctor``: this machine, the cluster, a query's rights, Spark's executors."""
