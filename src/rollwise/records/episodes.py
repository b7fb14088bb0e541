"""Some held-out episodes of every evaluation, in `episodes.jsonl`, to be looked at turn by turn in the report.

A line is one episode: `step`, `reward` (null for an unscored one), `success`, `ended_by`, `unscored` (why, or null) and
`turns`, each with what was shown (`text`, and `images` as data URIs of PNG files), the `answer` and its `reward`; the
last of them, which nobody answered, has neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Name of the file in a run's folder.
EPISODES = "episodes.jsonl"


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Read the episodes back; none where there is no file, and without lines that were cut off or are none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, Mapping) and isinstance(row.get("step"), int) and isinstance(row.get("turns"), Sequence):
            found.append(dict(row))
    return found
