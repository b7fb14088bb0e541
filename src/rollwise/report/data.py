"""What a report shows, as plain values: figures over seeds, curves thin enough to draw, counts, texts.

Everything that compares methods over seeds comes from `rollwise.study.aggregate`. A part for which the runs have no
data is empty.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollwise.evaluation.curve import Evaluation, accuracy_at
from rollwise.ledger import OUTCOMES, PENDING, TRAINED
from rollwise.report.runs import NOT_A_METHOD, Column, RunData, Source, read_source
from rollwise.report.samples import episodes, rollouts
from rollwise.study.aggregate import FinishedRun, aggregate, mean_over_seeds
from rollwise.usage import UsageError, suggestion

#: Points of one curve, at most; fewer where many arms share the page.
MOST_POINTS = 400
_MOST_BAND_POINTS = 80  # each is a bootstrap
_POINTS_OF_A_FIGURE = 6_000
_MOST_LIT = 8  # arms in colour at first
_AGE_BINS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+")
#: What is left of the outcomes where a run has no ledger yet.
WASTED = "wasted"

#: Curves over the steps: key, title, label of the y axis.
TRAINING = (
    ("rollwise/success_rate", "Success rate", "share of fresh rollouts that succeed"),
    ("rollwise/step_rollouts_generated", "Rollouts per step", "rollouts generated in a step"),
    ("rollwise/live_prompts", "Live prompts", "prompts that may still be drawn"),
    ("rollwise/age_mean", "Age of replayed rows", "mean age of drawn rows, steps"),
    ("completions/mean_length", "Length", "mean tokens of a completion"),
    ("entropy", "Entropy", "mean entropy per token, nats"),
)
_POOL = (
    ("rollwise/live_prompts", "live prompts"),
    ("rollwise/retired_prompts", "retired prompts"),
)
_WAITING = (("rollwise/survivors_waiting", "survivors waiting"),)
_AGES = (("rollwise/age_mean", "mean age"), ("rollwise/age_max", "largest age"))


def gather(
    paths: Sequence[Path], *, baseline: str | None = None, target: float | None = None, samples: bool = True
) -> dict[str, Any]:
    """Read runs and studies, and gather all that a page shows of them.

    Args:
        paths: Folders of runs and of studies.
        baseline: The arm that the others are compared with; by default the study's own, else plain GRPO's where
            `rollwise train --baseline` made it, else the first.
        target: Held-out accuracy that rollouts are counted to; by default as the study's summary has it, else the
            smallest of the arms' peak mean accuracies.
        samples: Whether to show rollouts of checkpoints.

    Raises:
        UsageError: A folder is none of a run or a study, or there is no such arm.
    """
    if target is not None and not 0 < target <= 1:
        raise UsageError(f"the target is {target}; give a held-out accuracy above 0 and up to 1, such as 0.5")
    sources = [read_source(path) for path in paths]
    runs = _name_arms(sources)
    arms = list(dict.fromkeys(run.arm for run in runs))
    saved = next((source.summary for source in sources if source.summary.get("baseline") in arms), {})
    comparison = next((run.comparison for run in runs if run.comparison), None)
    plain = next((run.arm for run in runs if run.folder.name == "baseline"), None)
    if baseline is not None and baseline not in arms:
        raise UsageError(f"no arm {baseline!r}{suggestion(baseline, arms)}; there are {', '.join(arms[:20])}")
    baseline = baseline or saved.get("baseline") or plain or arms[0]
    if target is None and len(sources) == 1:
        target = comparison["target"] if comparison else None
        if saved and not saved.get("target_is_default"):
            target = saved.get("target")
    ended = [run for run in runs if run.has_ended and run.evaluations]
    summary = _aggregate(ended, arms, baseline, target, saved if len(sources) == 1 else {})
    order = _order(arms, baseline, summary)
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in order}
    points = max(40, min(MOST_POINTS, _POINTS_OF_A_FIGURE // len(order)))
    return {
        "title": ", ".join(dict.fromkeys(source.path.resolve().name for source in sources)),
        "sources": [
            {"path": str(source.path), "kind": source.kind, "runs": len(source.runs)}
            | {"ended": sum(run.has_ended for run in source.runs)}
            for source in sources
        ],
        "arms": [{"name": arm, "lit": i < _MOST_LIT} for i, arm in enumerate(order)],
        "baseline": baseline if len(order) > 1 else None,
        "summary": summary,
        "has_target": summary is not None and (len(summary["arms"]) > 1 or target is not None),
        "ends": _ends(by_arm),
        "curves": _curves(by_arm, min(points, _MOST_BAND_POINTS)),
        "going": [_progress(run) for run in runs if run.status == "running"],
        "failed": _early_ends(runs),
        "waste": {arm: found for arm, group in by_arm.items() if (found := _waste(group))},
        "training": _training(by_arm, points),
        "details": {
            arm: found for arm, group in by_arm.items() if any((found := _details(group, len(order))).values())
        },
        "settings": _settings(by_arm),
        "made_with": _made_with(runs),
        **(rollouts(by_arm) if samples else {"samples": [], "lengths": {}}),
        "episodes": episodes(by_arm) if samples else [],
    }


# Which runs are of one method


def _name_arms(sources: Sequence[Source]) -> list[RunData]:
    """Tell arms of different studies apart, and put runs that differ only in their seed into one."""
    studies = [source for source in sources if source.kind == "study"]
    loose = [run for source in sources if source.kind != "study" for run in source.runs]
    if len(sources) > 1:
        names = [{run.arm for run in source.runs} for source in studies]
        if sum(map(len, names)) > len(set().union(*names)):
            for source in studies:
                for run in source.runs:
                    run.arm = f"{source.path.resolve().name}: {run.arm}"
                    run.name = f"{source.path.resolve().name}: {run.name}"
    groups: dict[str, list[RunData]] = {}
    for run in loose:
        method = {name: value for name, value in run.settings.items() if name not in NOT_A_METHOD}
        key = json.dumps(method, sort_keys=True, default=str) if method else run.name
        while any(run.seed is None or other.seed == run.seed for other in groups.get(key, ())):
            key += "+"  # the same run twice, or one without a seed: an arm of its own
        groups.setdefault(key, []).append(run)
    taken = {run.arm for source in studies for run in source.runs}
    for group in groups.values():
        shared = os.path.commonprefix([run.arm for run in group]) if group[1:] else ""  # noqa: RUF071  a common start
        arm = re.sub(r"[-_ .]*(seed)?[-_ .]*\d*[-_ .]*$", "", shared) or group[0].arm
        unique, number = arm, 1
        while unique in taken:
            number += 1
            unique = f"{arm} ({number})"
        taken.add(unique)
        for run in group:
            run.arm = unique
    return [run for source in sources for run in source.runs]


def _order(arms: Sequence[str], baseline: str, summary: Mapping[str, Any] | None) -> list[str]:
    """The baseline first, then those that took the fewest rollouts to the target, then those without an end."""
    found = summary["arms"] if summary else {}

    def rank(arm: str) -> tuple[bool, bool, float]:
        if arm not in found:
            return arm != baseline, True, 0.0
        reached = found[arm]["share_reached"] == 1
        return arm != baseline, False, found[arm]["rollouts_to_target"]["value"] * (1 if reached else 1e6)

    return sorted(arms, key=rank) if len(arms) > _MOST_LIT else sorted(arms, key=lambda arm: arm != baseline)


# Figures over seeds


def _aggregate(
    ended: Sequence[RunData],
    arms: Sequence[str],
    baseline: str,
    target: float | None,
    saved: Mapping[str, Any],
) -> dict[str, Any] | None:
    if not ended:
        return None
    finished = [_finished(run, number) for number, run in enumerate(ended)]
    budgets = saved.get("budget_rollouts")
    return aggregate(finished, arms=arms, baseline=baseline, target=target, budget_rollouts=budgets)


def _finished(run: RunData, number: int = 0) -> FinishedRun:
    seed = run.seed if run.seed is not None else -1 - number
    return FinishedRun(run.arm, seed, run.evaluations, {name: float(value) for name, value in run.totals.items()})


def _ends(by_arm: Mapping[str, Sequence[RunData]]) -> dict[str, Any]:
    """Mean accuracy of the last evaluations of runs that have ended, by arm."""
    ends = {}
    for arm, group in by_arm.items():
        last = mean_over_seeds([run.evaluations[-1].accuracy for run in group if run.has_ended and run.evaluations])
        if last is not None:
            ends[arm] = {"value": last.value, "low": last.low, "high": last.high, "num_seeds": last.num_seeds}
    return ends


_AXES: tuple[tuple[str, Callable[[RunData], Sequence[float] | None]], ...] = (
    ("rollouts", lambda run: [float(e.rollouts_generated) for e in run.evaluations]),
    ("seconds", lambda run: [e.seconds for e in run.evaluations]),
    ("tokens", lambda run: run.tokens),
)


def _curves(by_arm: Mapping[str, Sequence[RunData]], points: int) -> dict[str, dict[str, Any]]:
    """Mean accuracy with its interval along each axis; runs that are going only where an arm has no other."""
    curves: dict[str, dict[str, Any]] = {}
    for axis, value_of in _AXES:
        for arm, group in by_arm.items():
            ended = [run for run in group if run.evaluations and run.has_ended]
            group = ended or [run for run in group if run.evaluations]
            values = [value_of(run) for run in group]
            if not group or any(found is None or found[-1] <= 0 for found in values):
                continue
            known = [found for found in values if found is not None]
            curve = _mean_curve([run.evaluations for run in group], known, points)
            if curve["x"]:
                curves.setdefault(axis, {})[arm] = curve | {"going": not ended, "runs": len(group)}
    return curves


def _mean_curve(
    evaluations: Sequence[Sequence[Evaluation]], values: Sequence[Sequence[float]], points: int
) -> dict[str, list[float]]:
    """Mean over runs, and its interval, at points of an axis that all of them cover; linear between evaluations."""
    scale = 1000  # seconds, too, as whole numbers
    on_axis = [
        [Evaluation(e.step, round(scale * x), e.accuracy, e.seconds) for e, x in zip(run, xs, strict=True)]
        for run, xs in zip(evaluations, values, strict=True)
    ]
    low = max(run[0].rollouts_generated for run in on_axis)
    high = min(run[-1].rollouts_generated for run in on_axis)
    grid = sorted({e.rollouts_generated for run in on_axis for e in run if low <= e.rollouts_generated <= high})
    curve: dict[str, list[float]] = {"x": [], "y": [], "low": [], "high": []}
    for x in thin(grid, points):
        found = [accuracy_at(run, x) for run in on_axis]
        mean = mean_over_seeds([value for value in found if value is not None])
        if mean is None:
            continue
        curve["x"].append(x / scale)
        curve["y"].append(mean.value)
        if mean.low is not None and mean.high is not None:
            curve["low"].append(mean.low)
            curve["high"].append(mean.high)
    return curve


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly apart, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


# What is still going


def _progress(run: RunData) -> dict[str, Any]:
    """How far a run is: of its steps, its epochs or its budget of rollouts, whichever ends first."""
    steps = run.columns.get("step")
    last = {name: float(values[-1]) for name, values in run.columns.items()} if steps is not None else {}
    final = run.evaluations[-1] if run.evaluations else None
    step = max(int(last.get("step", 0)), final.step if final else 0)
    rollouts = max(int(last.get("rollouts_generated", 0)), final.rollouts_generated if final else 0)
    seconds = max(last.get("seconds", 0.0), final.seconds if final else 0.0)
    most = _positive(run.settings.get("max_steps"))
    budget = _positive(run.settings.get("budget_rollouts"))
    shares = [done / whole for done, whole in ((step, most), (rollouts, budget)) if whole]
    share = min(1.0, max(shares)) if shares else None
    return {
        "name": run.name,
        "step": step,
        "max_steps": int(most) if most else None,
        "budget_rollouts": int(budget) if budget else None,
        "share": share,
        "accuracy": final.accuracy if final else None,
        "rollouts": rollouts,
        "seconds": seconds,
        "seconds_left": seconds * (1 - share) / share if share else None,
        "idle_seconds": run.idle_seconds,
    }


def _positive(value: Any) -> float | None:
    try:
        return float(value) if float(value) > 0 else None
    except (TypeError, ValueError):
        return None


# Where the rollouts went


def _waste(group: Sequence[RunData]) -> dict[str, Any] | None:
    """Generated rollouts per outcome and replayed rows, means over an arm's runs: of ledgers, else as logged so far."""
    told = [run for run in group if run.ledger]
    counts: dict[str, float] = {}
    replayed = 0.0
    if told:
        for run in told:
            for record in run.ledger:
                if record["kind"] == "generated":
                    counts[record["outcome"]] = counts.get(record["outcome"], 0) + record["rollouts"]
                else:
                    replayed += record["rollouts"]
        number = len(told)
    else:
        told = [run for run in group if "rollwise/rollouts_generated" in run.columns]
        for run in told:
            for outcome in (TRAINED, PENDING, WASTED):
                counts[outcome] = counts.get(outcome, 0) + _last(run, f"rollwise/rollouts_{outcome}")
            replayed += _last(run, "rollwise/rows_replayed")
        number = len(told)
    generated = sum(counts.values())
    if not told or not generated:
        return None
    ordered = [name for name in (*OUTCOMES, WASTED) if counts.get(name)]
    ordered += [name for name in counts if counts[name] and name not in ordered]
    return {
        "runs": number,
        "generated": generated / number,
        "replayed": replayed / number,
        "outcomes": {name: counts[name] / number for name in ordered},
    }


def _last(run: RunData, name: str) -> float:
    values = run.columns.get(name, np.array([]))
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else 0.0


def _waste_over_time(group: Sequence[RunData], most_bins: int) -> dict[str, Any] | None:
    """Generated rollouts per outcome by the step they were generated in, summed over an arm's runs."""
    records = [record for run in group for record in run.ledger]
    generated = [record for record in records if record["kind"] == "generated"]
    if not generated:
        return None
    edges = _edges(max(record["step"] for record in records) + 1, most_bins)
    if len(edges) < 3:
        return None
    rows: dict[str, Column] = {}
    for record in records:
        name = record["outcome"] if record["kind"] == "generated" else "replayed"
        column = int(np.searchsorted(edges, record["step"], side="right")) - 1
        rows.setdefault(name, np.zeros(len(edges) - 1))[column] += record["rollouts"]
    replayed = rows.pop("replayed", None)
    runs = sum(bool(run.ledger) for run in group)
    widths = np.diff(edges) * runs
    return {
        "edges": edges,
        "outcomes": {
            name: _rounded(rows[name] / widths, 2) for name in [*OUTCOMES, *(set(rows) - set(OUTCOMES))] if name in rows
        },
        "replayed": None if replayed is None else _rounded(replayed / widths, 2),
    }


# Curves over the steps


def _edges(steps: int, most_bins: int) -> list[int]:
    """Bounds of bins of steps of nearly one width, at most `most_bins` of them."""
    bins = max(1, min(steps, most_bins))
    return [round(i * steps / bins) for i in range(bins + 1)]


def binned(group: Sequence[RunData], name: str, most_bins: int) -> dict[str, list[float]] | None:
    """Mean of a logged value over an arm's runs and over steps next to each other.

    Returns:
        `x`, the middle of the steps of a bin, and `y`; bins without a value are left out. None where there is none.
    """
    told = [run.columns for run in group if name in run.columns]
    steps = np.concatenate([columns["step"] for columns in told]) if told else np.array([])
    values = np.concatenate([columns[name] for columns in told]) if told else np.array([])
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    if not len(steps):
        return None
    edges = np.array(_edges(int(steps.max()) + 1, most_bins))
    column = np.searchsorted(edges, steps, side="right") - 1
    count = np.bincount(column, minlength=len(edges) - 1)
    used = count > 0
    x = np.bincount(column, steps, len(edges) - 1)[used] / count[used]
    y = np.bincount(column, values, len(edges) - 1)[used] / count[used]
    return {"x": _rounded(x, 2), "y": [float(f"{value:.6g}") for value in y]}


def _training(by_arm: Mapping[str, Sequence[RunData]], points: int) -> list[dict[str, Any]]:
    curves = []
    for name, title, label in TRAINING:
        found = {arm: curve for arm, group in by_arm.items() if (curve := binned(group, name, points))}
        if any(len(curve["x"]) > 1 for curve in found.values()):
            curves.append({"key": name, "title": title, "label": label, "arms": found})
    return curves


def _details(group: Sequence[RunData], num_arms: int) -> dict[str, Any]:
    """What is drawn for one arm at a time."""
    columns = max(10, min(60, 1_200 // num_arms))
    points = max(24, min(200, 3_000 // num_arms))

    def lines(names: Sequence[tuple[str, str]]) -> dict[str, Any]:
        found = {label: curve for key, label in names if (curve := binned(group, key, points))}
        return found if any(len(curve["x"]) > 1 for curve in found.values()) else {}

    epoch = binned(group, "rollwise/epoch", points)
    pool = lines(_POOL)
    return {
        "waste": _waste_over_time(group, columns),
        "pool": pool,
        "epoch_end": epoch["y"][-1] if pool and epoch else None,
        "waiting": lines(_WAITING),
        "ess": _ess(group, columns),
        "ages": lines(_AGES),
    }


def _ess(group: Sequence[RunData], most_bins: int) -> dict[str, Any] | None:
    """Token-level effective sample size of the rows of each age, over the steps; None where nothing is old."""
    names = {age: f"rollwise/ess_token/age_{age}" for age in _AGE_BINS}
    told = [age for age, name in names.items() if any(name in run.columns for run in group)]
    if not set(told) - {"0"}:
        return None
    last = max(float(run.columns["step"][-1]) for run in group if "step" in run.columns)
    edges = _edges(int(last) + 1, most_bins)
    if len(edges) < 3:
        return None
    rows = {}
    for age in told:
        total, count = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
        for run in group:
            if names[age] not in run.columns:
                continue
            values = run.columns[names[age]]
            known = ~np.isnan(values)
            column = np.searchsorted(edges, run.columns["step"][known], side="right") - 1
            np.add.at(total, column, values[known])
            np.add.at(count, column, 1)
        rows[age] = [round(t / c, 3) if c else None for t, c in zip(total.tolist(), count.tolist(), strict=True)]
    return {"edges": edges, "rows": rows}


def _rounded(values: Column, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


# Texts


def _early_ends(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Runs that failed or were stopped, with why; more than three of the same end are counted, not named."""
    alike: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if run.status == "failed" or (run.stop_reason and run.status != "running"):
            alike.setdefault((run.status, run.stop_reason or ""), []).append(run.name)
    return [
        {"name": ", ".join(names) if len(names) <= 3 else f"{len(names)} runs", "status": status, "reason": reason}
        for (status, reason), names in alike.items()
    ]


def _settings(by_arm: Mapping[str, Sequence[RunData]]) -> dict[str, Any]:
    """Settings that differ between arms, as texts; one that differs between an arm's seeds says so."""
    names = sorted({name for group in by_arm.values() for run in group for name in run.settings} - set(NOT_A_METHOD))
    texts = {
        name: {arm: _setting([run.settings.get(name) for run in group]) for arm, group in by_arm.items()}
        for name in names
    }
    return {name: row for name, row in texts.items() if len(set(row.values())) > 1}


def _setting(values: Sequence[Any]) -> str:
    texts = list(dict.fromkeys(_text(value) for value in values))
    return texts[0] if len(texts) == 1 else "differs by run: " + ", ".join(texts[:3]) + (", ..." if texts[3:] else "")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:120] + "..."


def _made_with(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Each set of versions and commit that runs were made with, and how many runs."""
    made: dict[str, dict[str, Any]] = {}
    for run in runs:
        versions, commit = run.about.get("versions") or {}, run.about.get("commit")
        text = ", ".join(f"{name} {version}" for name, version in dict(versions).items())
        text += f", commit {str(commit)[:12]}{'-dirty' if str(commit).endswith('-dirty') else ''}" if commit else ""
        if text:
            made.setdefault(text, {"text": text, "runs": 0})["runs"] += 1
    return list(made.values())
