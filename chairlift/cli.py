"""The `chairlift` command: from what was typed to a verb, and from what went wrong to one line and an exit status.

0: done. 1: it failed. 2: what was typed makes no sense. 130: interrupted.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import tyro
from tyro.conf import subcommand

from chairlift.commands.bench import Bench
from chairlift.commands.chat import Chat
from chairlift.commands.flags import UsageError, registry
from chairlift.commands.plan import Plan
from chairlift.commands.run import Run
from chairlift.commands.serve import Serve
from chairlift.errors import ChairliftError, ConfigError

VERBS: Any = (
    Annotated[Serve, subcommand("serve")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Run, subcommand("run")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Plan, subcommand("plan")]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (None: the process's own) and return the exit status."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        verb = tyro.cli(
            VERBS,
            prog="chairlift",
            description="Continuous batching for any Hugging Face causal language model.",
            args=args,
            registry=registry,
        )
        return cast("Callable[[], int]", verb)()
    except (ConfigError, UsageError) as error:
        return _fail(error, 2)
    except (ChairliftError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: Exception, status: int) -> int:
    print("chairlift:", " ".join(str(error).split()), file=sys.stderr)
    return status
