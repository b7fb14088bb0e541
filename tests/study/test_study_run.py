import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from study_helpers import leave, play_train

from rollwise.errors import ConfigError
from rollwise.study import run as run_module
from rollwise.study.run import DONE, LOCK, Progress, is_finished, load_run, run_all, source_commit
from rollwise.study.spec import Run

PYTHON = sys.executable


class Watcher:
    def __init__(self):
        self.told = []

    def started(self, run):
        self.told.append(("started", run.name))

    def progress(self, run, progress):
        self.told.append(("progress", run.name, progress))

    def finished(self, run, seconds, accuracy):
        assert seconds > 0
        self.told.append(("finished", run.name, accuracy))

    def failed(self, failure):
        self.told.append(("failed", failure.run.name))


def a_run(arm="plain", seed=0, **fields):
    return Run(arm, seed, {"seed": seed, "end": 0.5} | fields)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Make runs with a played training; gives the failures."""
    monkeypatch.setattr(run_module, "_SECONDS_BETWEEN_LOOKS", 0.02)
    play_train(monkeypatch, tmp_path)

    def make(*runs, processes=1):
        make.watcher = Watcher()
        return run_all(runs, tmp_path / "out", study="demo", processes=processes, watcher=make.watcher)

    make.output = tmp_path / "out"
    return make


def test_a_run_leaves_all_that_made_it(make):
    run = a_run(seed=3, env={"A": "1"})
    assert make(run) == []
    folder = make.output / "plain" / "seed-3"
    names = {"recipe.yaml", "run.json", "log.txt", "metrics.jsonl", "summary.json", DONE}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "log.txt").read_text() == "playing demo-plain-seed-3 with 1 thread\n"
    about = json.loads((folder / "run.json").read_text())
    assert (about["arm"], about["seed"], about["study"]) == ("plain", 3, "demo")
    assert {"python", "torch", "trl", "rollwise"} <= set(about["versions"])
    assert is_finished(run, make.output)
    assert load_run(run, make.output).evaluations[-1].accuracy == 0.53
    assert make.watcher.told[-1] == ("finished", "plain/seed-3", 0.53)


def test_runs_start_in_order_and_a_failed_one_stops_no_other(make):
    failures = make(a_run(), a_run("bad", play="fail"), a_run("empty", play="empty"), a_run(seed=1))
    started = [told[1] for told in make.watcher.told if told[0] == "started"]
    assert started == ["plain/seed-0", "bad/seed-0", "empty/seed-0", "plain/seed-1"]
    assert [failure.run.name for failure in failures] == ["bad/seed-0", "empty/seed-0"]
    assert failures[0].exit_code == 1
    assert failures[0].log_end.endswith("rollwise: it is broken")
    assert "without an evaluation" in failures[1].log_end
    assert not is_finished(a_run("bad", play="fail"), make.output)
    assert is_finished(a_run(seed=1), make.output)


def test_what_a_run_that_was_cut_off_left_is_deleted(make):
    folder = make.output / "plain" / "seed-0"
    make(a_run(play="fail"))
    (folder / "half").write_text("x")
    make(a_run())
    assert not (folder / "half").exists()
    assert (folder / DONE).is_file()


def test_several_runs_at_a_time_and_a_signal_ends_them_all(make):
    runs = [a_run(seed=seed, play="hang") for seed in range(3)]

    def signal_once_two_run():
        while not all((make.output / f"plain/seed-{s}/train/metrics.jsonl").is_file() for s in (0, 1)):
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_once_two_run)
    thread.start()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        make(*runs, processes=2)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == handler
    told = make.watcher.told
    assert {item[1] for item in told if item[0] == "started"} == {"plain/seed-0", "plain/seed-1"}
    assert ("progress", "plain/seed-1", Progress(1, 100, 0.51)) in told
    with (make.output / LOCK).open("w") as lock:  # a run that is still alive would hold it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_belongs_to_one_study_at_a_time(make):
    make.output.mkdir()
    with (make.output / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is at work in"):
            make(a_run())
    make(a_run())


def test_a_run_that_outlived_its_study_keeps_the_folder(make):
    """Killed with SIGKILL a study cannot stop its runs; a new one must not write beside them."""
    code = f"""
import sys
from pathlib import Path
from unittest.mock import Mock
from rollwise.study.run import run_all
from rollwise.study.spec import Run
sys.executable = {sys.executable!r}
run = Run("plain", 0, {{"seed": 0, "end": 0.5, "play": "hang"}})
run_all([run], Path({str(make.output)!r}), study="demo", processes=1, watcher=Mock())
"""
    study = subprocess.Popen([PYTHON, "-c", code])
    metrics = make.output / "plain/seed-0/train/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.is_file():
        assert time.monotonic() < deadline
        assert study.poll() is None
        time.sleep(0.05)
    (child,) = subprocess.check_output(["pgrep", "-P", str(study.pid)], text=True).split()
    study.kill()
    study.wait()
    try:
        with pytest.raises(ConfigError, match="a run that outlived one"):
            make(a_run())
    finally:
        os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:  # the kernel lets go of the lock a moment after
        try:
            assert make(a_run()) == []
            break
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_folder_of_other_things_is_left_alone(make):
    make.output.mkdir()
    (make.output / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds other files than a study's; name another --output"):
        make(a_run())
    assert [path.name for path in make.output.iterdir()] == ["thesis.tex"]


def test_a_finished_run_with_other_settings_is_refused(tmp_path):
    leave(a_run(learning_rate=1e-4), tmp_path, (0, 0.2), (100, 0.4))
    assert is_finished(a_run(learning_rate=1e-4), tmp_path)
    with pytest.raises(
        ConfigError, match=r"plain/seed-0 .*\(beta was not set, is 0.1; learning_rate was 0.0001, is 0.0002\)"
    ):
        is_finished(a_run(learning_rate=2e-4, beta=0.1), tmp_path)


def test_the_commit_is_that_of_rollwise_and_not_of_a_repository_around_it(monkeypatch, tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    git("init", "-q")
    package = tmp_path / "site" / "rollwise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(run_module.rollwise, "__file__", str(package / "__init__.py"))
    assert source_commit() is None  # not tracked there
    git("add", ".")
    git("commit", "-qm", "x")
    commit = source_commit()
    assert len(commit) == 40
    (package / "__init__.py").write_text("edited")
    assert source_commit() == f"{commit}-dirty"
