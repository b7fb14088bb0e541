"""Runs of a study as they lie on the disk, and a process that plays `rollwise train`."""

import json
import stat
import sys

import yaml

from rollwise.evaluation.curve import Evaluation
from rollwise.records.metrics import ACCURACY
from rollwise.records.summary import METRICS, SUMMARY
from rollwise.study.aggregate import FinishedRun
from rollwise.study.run import DONE, RECIPE, RUN, folder_of

VERSIONS = {"python": "3.11", "rollwise": "1"}


def curve(*points):
    """Evaluations from (rollouts, accuracy) pairs, ten steps and four seconds apart."""
    return [Evaluation(10 * i, rollouts, accuracy, 4.0 * i) for i, (rollouts, accuracy) in enumerate(points)]


def finished_run(arm, seed, *points, trained=50, replayed=0):
    evaluations = curve(*points)
    totals = {
        "rollouts_generated": evaluations[-1].rollouts_generated,
        "rollouts_trained": trained,
        "rows_replayed": replayed,
        "seconds": evaluations[-1].seconds + 1.0,
    }
    return FinishedRun(arm, seed, evaluations, totals)


def leave(run, output, *points, commit="abc", **totals):
    """Write a finished run's folder."""
    folder = folder_of(run, output)
    folder.mkdir(parents=True)
    played = finished_run(run.arm, run.seed, *points, **totals)
    rows = [
        {"step": e.step, "seconds": e.seconds, "rollouts_generated": e.rollouts_generated, ACCURACY: e.accuracy}
        for e in played.evaluations
    ]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / SUMMARY).write_text(json.dumps({"status": "finished", "seed": run.seed, **played.totals}))
    (folder / RECIPE).write_text(yaml.safe_dump(dict(run.fields)))
    (folder / RUN).write_text(json.dumps({"versions": VERSIONS, "commit": commit}))
    (folder / DONE).write_text(json.dumps({"seconds_process": 9.0}))


#: Reads its recipe as `rollwise train` does; the field `play` says what it does: nothing more, `fail`, `hang`, `empty`.
_TRAIN = """#!{python}
import json, os, sys, time
import yaml
assert sys.argv[1:4] == ["-m", "rollwise.cli", "train"], sys.argv
recipe, output = sys.argv[4], sys.argv[sys.argv.index("--output_dir") + 1]
fields = yaml.safe_load(open(recipe))
print("playing", sys.argv[sys.argv.index("--run_name") + 1], "with", os.environ["OMP_NUM_THREADS"], "thread")
os.mkdir(output)
if fields.get("play") == "fail":
    sys.exit("rollwise: it is broken")
accuracies = [] if fields.get("play") == "empty" else [0.25, fields["end"] + fields["seed"] / 100]
with open(output + "/metrics.jsonl", "w") as file:
    for step, accuracy in enumerate(accuracies):
        row = {{"step": step, "seconds": float(step), "rollouts_generated": 100 * step, "{accuracy}": accuracy}}
        print(json.dumps(row), file=file, flush=True)
if fields.get("play") == "hang":
    time.sleep(600)
totals = {{"rollouts_generated": 100, "rollouts_trained": 50, "rows_replayed": 0, "seconds": 1.0}}
json.dump({{"seed": fields["seed"]}} | totals, open(output + "/summary.json", "w"))
"""


def play_train(monkeypatch, folder):
    """Make the processes of a study play their training."""
    script = folder / "python-that-plays"
    script.write_text(_TRAIN.format(python=sys.executable, accuracy=ACCURACY))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
