"""What every test shares: no network, and property tests that neither time out nor vary in CI."""

import os

from hypothesis import settings

# Read once, when huggingface_hub is first imported: a test that reaches for the Hub fails instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("chairlift", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("chairlift")
