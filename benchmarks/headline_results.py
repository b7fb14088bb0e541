"""The headline study's results as they are published: `docs/results/headline.json` and the README's table.

    rollwise study benchmarks/headline.yaml                       # leaves runs/headline
    python benchmarks/headline_results.py runs/headline           # prints the README's table
    python benchmarks/headline_results.py runs/headline --write   # writes docs/results/headline.json and the table

Several folders are several workloads. `--write` alone makes the table again from the committed JSON.
"""

import argparse
import json
import os
import platform
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "headline.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- headline: made by benchmarks/headline_results.py -->", "<!-- /headline -->"

NAMES = {
    "grpo": "GRPO",
    "grpo_2_epochs": "GRPO, 2 epochs a batch",
    "dynamic_sampling": "DAPO",
    "pilot_commit": "Pilot-Commit",
    "belief": "belief allocation",
    "replay": "rollout-level replay",
    "query_pool_uniform": "uniform query pool",
    "query_pool_std": "group-std query pool",
    "advantage_pool": "\\|A\\| pool",
    "fifo_uniform": "uniform FIFO pool",
    "per": "PER",
    "per_reset_only": "PER, newcomers at their own priority",
    "freshper": "FreshPER",
    "pilot_commit_replay": "Pilot-Commit + replay",
    "belief_replay": "belief + replay",
}
#: A run that never reached the target makes its method's figure a bound; two such figures have a ratio of either side.
SIGNS = {"=": "", ">=": "≥ ", "<=": "≤ ", "?": "~ "}


def workload(folder):
    """What is published of one study."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "study": summary["name"],
        "command": f"rollwise study benchmarks/{summary['name']}.yaml",
        "baseline": summary["baseline"],
        "target_accuracy": summary["target"],
        "budget_rollouts": summary["budget_rollouts"][-1],
        "interval": summary["interval"],
        "runs_missing": summary["runs_missing"],
        "sources": [{"commit": source["commit"], "versions": source["versions"]} for source in summary["sources"]],
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, shared",
        "methods": {arm: method(found) for arm, found in summary["arms"].items()},
    }


def method(found):
    waste = found["share_trained"]
    share_reached = {"share_reached": found["share_reached"]}
    return {
        "rollouts_to_target": figure(found["rollouts_to_target"]) | share_reached,
        "seconds_to_target": figure(found["seconds_to_target"]) | share_reached,
        "rollouts_ratio": figure(found["rollouts_ratio"]),
        "seconds_ratio": figure(found["seconds_ratio"]),
        "final_accuracy": figure(found["accuracy"][-1]),
        "final_accuracy_difference": figure(found["accuracy_difference"][-1]),
        "waste": figure(
            waste and waste | {k: 1 - waste[j] for k, j in (("value", "value"), ("low", "high"), ("high", "low"))}
        ),
        "accuracy_at_rows_trained": [figure(e) for e in found["accuracy_at_rows_trained"]],
        "accuracy_by_level": {
            name.removeprefix("accuracy/"): figure(estimate)
            for name, estimate in found["held_out"].items()
            if name.startswith("accuracy/")
        },
    }


def figure(estimate):
    """An estimate as mean, low, high and number of seeds; `bound` says where it is one."""
    if estimate is None:
        return {"mean": None, "low": None, "high": None, "seeds": 0}
    names = {"mean": "value", "low": "low", "high": "high", "seeds": "num_seeds"}
    plain = {name: estimate[key] for name, key in names.items()}
    return plain | ({"bound": estimate["bound"]} if estimate["bound"] != "=" else {})


def table(results):
    """The README's table: by how much each method's rollouts to the target are fewer than GRPO's, per workload."""
    workloads = results["workloads"].values()
    arms = list(dict.fromkeys(arm for found in workloads for arm in found["methods"]))
    lines = [
        ["method", *results["workloads"]],
        ["---", *("---:" for _ in workloads)],
        *([NAMES.get(arm, arm), *(cell(found, arm) for found in workloads)] for arm in arms),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(found, arm):
    if arm not in found["methods"]:
        return ""
    method = found["methods"][arm]
    if arm == found["baseline"]:
        to_target = method["rollouts_to_target"]
        rollouts = f"{SIGNS[to_target.get('bound', '=')]}{to_target['mean']:,.0f} to {found['target_accuracy']:.3f}"
        return f"{rollouts}, {method['waste']['mean']:.0%} wasted"
    ratio = method["rollouts_ratio"]
    if ratio["mean"] is None:
        return "-"
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{SIGNS[ratio.get('bound', '=')]}{ratio['mean']:.2f}{interval}"


def with_table(text, results):
    """The README's text with the table of these results between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(results)}{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", metavar="STUDY_FOLDER")
    parser.add_argument("--names", nargs="*", help="what the workloads are called; the studies' names by default")
    parser.add_argument("--write", action="store_true", help="write docs/results/headline.json and the README's table")
    options = parser.parse_args()
    if options.folders:
        found = [workload(folder) for folder in options.folders]
        names = options.names or [one["study"] for one in found]
        results = {"workloads": dict(zip(names, found, strict=True))}
    else:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        README.write_text(with_table(README.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
