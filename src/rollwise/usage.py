"""Mistakes in what was asked for, and the words for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rollwise.errors import RollwiseError


class UsageError(RollwiseError, ValueError):
    """What was asked cannot be done; the message gives the value, the choices or bound, and the remedy."""


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
