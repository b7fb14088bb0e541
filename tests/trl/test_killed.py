"""Promise 3: killed at any moment and resumed, the run is the one that was never killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from rollwise.trl.checkpoints import newest_checkpoint

SETTINGS = {"allocation": "pilot_commit", "pilot_rollouts": 3, "p_lower": 0.1, "replay_ratio": 0.5, "max_steps": 25}
CHILD = f"""
import sys, torch, tiny
torch.set_num_threads(1)
tiny.trainer(sys.argv[1], save_strategy="steps", save_steps=1, save_total_limit=2, **{SETTINGS}).train()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never killed."""
    trainer = tiny.trainer(tmp_path_factory.mktemp("whole"), **SETTINGS)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_a_random_moment(tmp_path, whole, seed):
    folder = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        deadline = time.monotonic() + 120
        while not list(folder.glob("checkpoint-*/trainer_state.json")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(random.Random(seed).uniform(0.0, 0.8))
        child.send_signal(signal.SIGKILL)
    assert newest_checkpoint(folder) != str(folder / "checkpoint-25")  # it was not at its end yet

    resumed = tiny.trainer(folder, **SETTINGS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.ledger.records() == whole.ledger.records()
    for expected, parameter in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, parameter)


def test_a_checkpoint_that_was_not_saved_to_its_end_is_passed_over(tmp_path, caplog):
    trainer = tiny.trainer(tmp_path, save_strategy="steps", save_steps=1, **(SETTINGS | {"max_steps": 3}))
    trainer.train()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": ')
    (tmp_path / "checkpoint-4").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert "checkpoint-3 is left out: its saving was interrupted" in caplog.text
    again = tiny.trainer(tmp_path, **(SETTINGS | {"max_steps": 3}))
    again.train(resume_from_checkpoint=True)
    assert again.ledger.records() == trainer.ledger.records()


def test_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
