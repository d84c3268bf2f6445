"""For judging runs from outside."""
