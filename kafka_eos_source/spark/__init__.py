"""Facts about Spark that the packages below the data source need, and settings that make it faster."""
