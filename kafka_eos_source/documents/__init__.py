"""JSON documents and Arrow columns: decodes documents by a declared schema, and writes rows as Spark does."""
