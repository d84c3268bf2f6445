"""What the command line does: inspect a query, repair it, clean up after it, manage its state and topics.

`docs/runbooks.md` explains when to use which command.
"""
