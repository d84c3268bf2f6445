"""What the command line does: inspect a query, repair it, clean up after it, manage its state and topics.

`docs/runbooks.md` explains when to use which command. Each function that asks Kafka raises `UnavailableError`
or `AuthorizationError` if Kafka does not answer or refuses. The command line prints every `KafkaEosError`.
"""
