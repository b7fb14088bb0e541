"""Rollouts of a run: those that TRL logged (`log_completions`), else those in its newest checkpoint's buffer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollwise.files import checkpoint_folders
from rollwise.records.episodes import EPISODES, read_episodes
from rollwise.records.stored import stored_rows
from rollwise.report.runs import RunData
from rollwise.usage import one_line

_MOST_RUNS = 6
_MOST_FILES = 60
_PER_SIDE = 3
_MOST_CHARACTERS = 1_200
_MOST_TURNS = 40
_MOST_PICTURE_BYTES = 1_500_000
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+=*")
_NOT_REWARDS = ("step", "prompt", "completion", "advantage", "images")


def rollouts(by_arm: Mapping[str, Sequence[RunData]]) -> dict[str, Any]:
    """Sample rollouts and lengths of right and wrong answers, of one run per arm, for the first arms that have some.

    Returns:
        `samples`, a list, and `lengths`, by arm.
    """
    samples: list[dict[str, Any]] = []
    lengths: dict[str, Any] = {}
    for arm, group in by_arm.items():
        if len(samples) == _MOST_RUNS:
            break
        for run in group:
            try:
                found = _logged(run) or _stored(run)
            except Exception as error:  # noqa: BLE001  a damaged checkpoint must not cost the page
                samples.append(
                    {"arm": arm, "run": run.name, "source": f"cannot be read: {one_line(error)}", "rows": []}
                )
                break
            if found is not None:
                source, unit, rows = found
                samples.append({"arm": arm, "run": run.name, "source": source, "rows": _extremes(rows)})
                if measured := _lengths(rows, unit, source):
                    lengths[arm] = measured
                break
    return {"samples": samples, "lengths": lengths}


def episodes(by_arm: Mapping[str, Sequence[RunData]]) -> list[dict[str, Any]]:
    """Held-out episodes, of one run per arm, for the first arms that have some: of its first, middle and last steps.

    Pictures count to a total size, beyond which turns are shown without.
    """
    found: list[dict[str, Any]] = []
    room = _MOST_PICTURE_BYTES
    for arm, group in by_arm.items():
        if len(found) == _MOST_RUNS:
            break
        for run in group:
            if rows := read_episodes(run.folder / EPISODES):
                steps = sorted({row["step"] for row in rows})
                chosen = {steps[0], steps[len(steps) // 2], steps[-1]}
                shown = []
                for row in rows:
                    if row["step"] in chosen:
                        shown.append(_episode(row, room))
                        room -= sum(len(image) for turn in shown[-1]["turns"] for image in turn["images"])
                found.append({"arm": arm, "run": run.name, "rows": shown})
                break
    return found


def _episode(row: Mapping[str, Any], room: int) -> dict[str, Any]:
    turns = []
    for turn in row["turns"][:_MOST_TURNS]:
        images = [image for image in turn.get("images") or () if _PICTURE.fullmatch(str(image))]
        size = sum(map(len, images))
        room -= size
        turns.append(
            {"text": _shortened(_text(turn.get("text"))), "images": images if room >= 0 else []}
            | {"left_out": len(images) if room < 0 else 0, "reward": turn.get("reward")}
            | {"answer": None if turn.get("answer") is None else _shortened(_text(turn["answer"]))}
        )
    return {
        "step": row["step"],
        "reward": row.get("reward"),
        "success": bool(row.get("success")),
        "ended_by": str(row.get("ended_by") or ""),
        "unscored": row.get("unscored"),
        "turns": turns,
        "left_out": len(row["turns"]) - len(turns),
    }


_Found = tuple[str, str, list[dict[str, Any]]]


def _stored(run: RunData) -> _Found | None:
    if not checkpoint_folders(run.folder):
        return None
    rows = stored_rows(run.folder)
    threshold = _threshold(run)
    for row in rows:
        row["right"] = row["reward"] >= threshold
        row["length"] = row["num_tokens"]
        row["step"] = row["birth_step"]
    return ("replay buffer of the newest checkpoint, where rollouts without a gradient are not", "tokens", rows)


def _logged(run: RunData) -> _Found | None:
    """The rows of TRL's tables of completions: whole batches of some steps."""
    files = sorted((run.folder / "completions").glob("completions_*.parquet"))
    if not files:
        return None
    import pyarrow.parquet as pq

    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, _MOST_FILES).round().astype(int))]
    weights = run.settings.get("reward_weights")
    rows = []
    for file in chosen:
        table = pq.read_table(file)
        names = [name for name in table.schema.names if name not in _NOT_REWARDS]
        factors = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
        for row in table.to_pylist():
            parts = [row[name] for name in names]
            if not any(isinstance(part, int | float) and math.isfinite(part) for part in parts):
                continue  # unscored
            reward = sum(w * part for w, part in zip(factors, parts, strict=True) if part is not None and part == part)
            text = _text(row["completion"])
            rows.append(
                {"step": row["step"], "prompt": row["prompt"], "completion": row["completion"], "reward": reward}
                | {"advantage": row["advantage"], "right": reward >= _threshold(run), "length": len(text)}
            )
    return ("completions that TRL logged", "characters", rows) if rows else None


def _threshold(run: RunData) -> float:
    return float(run.settings.get("success_threshold") or 1.0)


def _lengths(rows: Sequence[Mapping[str, Any]], unit: str, source: str) -> dict[str, Any] | None:
    """Lengths of right and of wrong answers: their quartiles, and their means by step."""
    table, lines = [], {}
    for label, is_right in (("right", True), ("wrong", False)):
        chosen = [row for row in rows if row["right"] == is_right]
        if not chosen:
            continue
        sizes = np.array([row["length"] for row in chosen], np.float64)
        low, median, high = np.quantile(sizes, (0.25, 0.5, 0.75)).tolist()
        quartiles = {"q25": low, "median": median, "q75": high}
        table.append({"label": label, "count": len(chosen), "mean": float(sizes.mean())} | quartiles)
        steps = np.array([row["step"] for row in chosen])
        known = np.unique(steps)
        lines[label] = {
            "x": [float(step) for step in known],
            "y": [round(float(sizes[steps == step].mean()), 2) for step in known],
        }
    return {"unit": unit, "source": source, "table": table, "lines": lines} if len(table) == 2 else None


def _extremes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rollouts of the largest and of the smallest advantage, the newest of equals first, each text once."""
    seen: set[tuple[str, str]] = set()
    ranked = []
    for row in sorted(rows, key=lambda row: (-row["advantage"], -row["step"])):
        key = (_text(row.get("prompt")), _text(row.get("completion")))
        if key not in seen:
            seen.add(key)
            ranked.append(row)
    if len(ranked) > 2 * _PER_SIDE:
        ranked = ranked[:_PER_SIDE] + ranked[-_PER_SIDE:]
    return [
        {key: row[key] for key in ("reward", "advantage", "step", "length", "right")}
        | {key: _shortened(_text(row.get(key))) for key in ("prompt", "completion")}
        for row in ranked
    ]


def _text(value: Any) -> str:
    """A prompt or completion as text; a conversation with the role before each message."""
    if isinstance(value, list):
        parts = [part for part in value if isinstance(part, dict)]
        return "\n".join(f"{part.get('role')}: {part.get('content')}" for part in parts)
    return "" if value is None else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ... ({len(text):,} characters)"
