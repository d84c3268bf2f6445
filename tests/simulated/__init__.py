"""Simulations that the tests share."""
