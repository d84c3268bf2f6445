"""Coverage-guided fuzzing of the border for foreign bytes: ``./dev fuzz MINUTES``."""
