"""Mistakes of the person at the keyboard: one line each, on stderr, exit code 2, no traceback."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rollwise.errors import ConfigError, RollwiseError, VersionError

#: Environment variable that keeps the traceback of a mistake.
TRACEBACK = "ROLLWISE_TRACEBACK"


class UsageError(RollwiseError, ValueError):
    """What was asked cannot be done; the message gives the value, the choices or bound, and the remedy."""


#: Errors about what was asked for; all others of ours end a run that had begun.
_MISTAKES = (UsageError, ConfigError, VersionError)


def one_line(error: BaseException | str) -> str:
    """Return an error's message on a single line."""
    return " ".join(str(error).split()) or type(error).__name__


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'learning_rate'?` for the closest known name, or nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def missing_extra(*modules: str, extra: str = "trl") -> str | None:
    """Say how to install what is missing of `modules`, or return None where all of them can be imported.

    Args:
        modules: Names of modules.
        extra: The extra of this package that brings them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    return f"this command needs {' and '.join(missing)}: pip install 'rollwise[{extra}]'"


def require(*modules: str, extra: str = "trl") -> None:
    """Refuse to go on without some modules.

    Raises:
        UsageError: One of them is missing; see `missing_extra`.
    """
    if problem := missing_extra(*modules, extra=extra):
        raise UsageError(problem)


@contextmanager
def loading(subject: str, remedy: str = "") -> Iterator[None]:
    """While a data set is loaded with `datasets`: what goes wrong there is what was asked for.

    Args:
        subject: What is loaded, with what to say of it: `data set 'x' cannot be loaded`.
        remedy: What to do about it, after the cause.

    Raises:
        UsageError: It cannot be loaded.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UsageError:
        raise
    except (RollwiseError, OSError, ValueError, DatasetsError) as error:
        raise UsageError(f"{subject}: {one_line(error)[:300]}{remedy}") from None


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
