"""The demo: a query over real flights whose driver is killed repeatedly loses and doubles no event."""
