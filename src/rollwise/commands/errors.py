"""Ends of a command: one line on stderr for a mistake of the person at the keyboard, exit code 2, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollwise.errors import ConfigError, RollwiseError, VersionError
from rollwise.usage import UsageError, one_line

#: Environment variable that keeps the traceback of a mistake.
TRACEBACK = "ROLLWISE_TRACEBACK"

#: Errors about what was asked for; all others of ours end a run that had begun.
_MISTAKES = (UsageError, ConfigError, VersionError)


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """End the process with a message and without a traceback where the cause is known.

    Exit codes: 2 for a mistake in what was asked, 1 for a run that Rollwise ended with a reason, 130 for Ctrl-C.
    `ROLLWISE_TRACEBACK=1` keeps the traceback all the same; anything else, a bug or a fault of the machine, has it.
    """
    try:
        yield
    except RollwiseError as error:
        if os.environ.get(TRACEBACK):
            raise
        hint = f" ({TRACEBACK}=1 shows where)" if error.__cause__ is not None else ""
        sys.stderr.write(f"rollwise: {one_line(error)}{hint}\n")
        raise SystemExit(2 if isinstance(error, _MISTAKES) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
