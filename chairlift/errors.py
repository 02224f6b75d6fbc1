"""The exceptions of Chairlift, one tree.

ChairliftError
├── UnsupportedModelError           a model that cannot be served, refused by name at start-up
├── ConfigError (ValueError)        a configuration that makes no sense
├── InvalidRequestError (ValueError)  a request that can never be answered, refused at submit
├── QueueFullError                  the waiting queue is at `max_queue_size`; try again later (HTTP 429)
└── EngineDeadError (RuntimeError)  the engine stopped on a fault; `__cause__` is the fault (HTTP 503)
"""

from collections.abc import Mapping


class ChairliftError(Exception):
    """Base of every error that Chairlift raises on purpose."""


class UnsupportedModelError(ChairliftError):
    """The model has a layer or a feature that cannot be served; the message names it."""


class ConfigError(ChairliftError, ValueError):
    """A configuration value makes no sense; the message names the field, the value and the remedy."""


class InvalidRequestError(ChairliftError, ValueError):
    """A request that can never be answered; the message names the argument, the value and the remedy."""


class QueueFullError(ChairliftError):
    """The waiting queue holds `max_queue_size` requests already."""


class EngineDeadError(ChairliftError, RuntimeError):
    """The engine stopped on a fault. `__cause__` holds the fault, `partial` what had finished before it."""

    def __init__(self, message: str, partial: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.partial: dict[str, object] = dict(partial or {})
