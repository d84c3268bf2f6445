"""The machine that runs the tests is shared: no test is judged by its time."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
