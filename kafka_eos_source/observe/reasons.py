"""Reasons why a query stands still that more than people have to recognise."""

from __future__ import annotations

#: How the reason of a source begins that waits for another producer's transaction.
OPEN_TRANSACTIONS = "open transactions in"
