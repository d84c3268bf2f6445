"""Tools that judge a query or a sink from outside.

`sinks` has conformance tests for sinks, `kills` kills code at each of its lines, and `verdict` compares an
output with the expected one.
"""
