"""Common test settings: no test fails for its run time, because the machine may be shared."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
