"""Entry point of the `rollwise` command: everything else is imported only when a command needs it."""

from __future__ import annotations

import sys

from rollwise.usage import missing_extra


def main() -> None:
    """Run the command line; exits with 0 (done), 1 (failed), 2 (a mistake in what was asked) or 130 (Ctrl-C)."""
    if problem := missing_extra("typer", "rich"):
        sys.stderr.write(f"rollwise: {problem}\n")
        raise SystemExit(2)
    from rollwise.commands.app import app

    app()


if __name__ == "__main__":
    main()
