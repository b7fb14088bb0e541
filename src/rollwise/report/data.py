"""What a report shows, as plain values: figures over seeds, curves thin enough to draw, counts, texts.

Everything that compares methods over seeds comes from `rollwise.study.aggregate`. A part for which the runs have no
data is empty.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwise.report.curves import accuracy_curves
from rollwise.report.runs import NOT_A_METHOD, RunData, Source, read_source
from rollwise.report.samples import episodes, rollouts
from rollwise.report.steps import details, training, waste
from rollwise.study.aggregate import FinishedRun, aggregate, mean_over_seeds
from rollwise.usage import UsageError, suggestion

#: Points of one curve, at most; fewer where many arms share the page.
MOST_POINTS = 400
_MOST_BAND_POINTS = 80  # each is a bootstrap
_POINTS_OF_A_FIGURE = 6_000
_MOST_LIT = 8  # arms in colour at first


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
        "curves": accuracy_curves(by_arm, min(points, _MOST_BAND_POINTS)),
        "going": [_progress(run) for run in runs if run.status == "running"],
        "failed": _early_ends(runs),
        "waste": {arm: found for arm, group in by_arm.items() if (found := waste(group))},
        "training": training(by_arm, points),
        "details": {arm: found for arm, group in by_arm.items() if any((found := details(group, len(order))).values())},
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
