"""``./dev demo``: real flights, a driver killed again and again, nothing missing, nothing twice."""
