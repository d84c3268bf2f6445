"""A transactional client that speaks Kafka's protocol itself: one producer epoch for each transaction."""
