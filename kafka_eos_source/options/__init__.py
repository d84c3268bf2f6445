"""The options of the formats: one table, from which parsing, checks and documentation follow."""
