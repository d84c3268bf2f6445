"""Tools that judge a query or a sink from outside.

`sinks` has conformance tests for sinks, `history` and `checker` judge recorded runs, and `verdict` compares
an output with the expected one.
"""
