"""What every test shares: no network, and property tests that do not time out, and vary only when asked to."""

import os
import signal

from hypothesis import settings

# Read once, when huggingface_hub is first imported: a test that reaches for the Hub fails instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"

# Whatever started the tests may ignore Ctrl-C (a shell does, for what it starts in the background). What the tests
# start would inherit that, and the tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` tries the same examples each time; `make search` looks for new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("same")
