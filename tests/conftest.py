"""hypothesis tries the same examples in every run; with HYPOTHESIS_PROFILE=explore it looks for new ones."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
