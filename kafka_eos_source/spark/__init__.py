"""Interfaces to Spark that the lower packages use: row schemas, the running task, settings, worker tuning."""
