"""TRL's side of `decisions.py`. `real/test_engines.py` has verl's; both compare with decisions.json.

To write that file anew: python tests/verl/test_same_decisions.py
"""

import json
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from decisions import (
    ALLOCATION,
    FILE,
    NUM_PROMPTS,
    REPLAY,
    ROLLOUTS,
    SEED,
    STEPS,
    TRAIN_PROMPTS,
    decisions,
    expected,
    forget_rewards,
    reward_function,
)
from verl_on_cpu import recording

from rollwise.tasks.arithmetic import generate_problems, model_path


def run_trl(folder, patch=setattr):
    """Train with TRL and return what was decided."""
    forget_rewards()
    from datasets import Dataset

    from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer

    patch(recording, "FOLDER", str(folder))
    recording.record_decisions(patch)
    args = RollwiseGRPOConfig(
        str(folder / "out"),
        allocation="pilot_commit",
        **ALLOCATION,
        **{f"replay_{name}": value for name, value in REPLAY.items()},
        num_generations=ROLLOUTS,
        per_device_train_batch_size=TRAIN_PROMPTS * ROLLOUTS,
        max_completion_length=4,
        max_steps=STEPS,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    problems = generate_problems(NUM_PROMPTS, seed=0, levels=("sort-3",))
    dataset = Dataset.from_list([{"prompt": problem.prompt} for problem in problems])
    RollwiseGRPOTrainer(str(model_path()), reward_function, args, dataset).train()
    return decisions([json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()])


def _has_trl():
    try:
        return bool(metadata.version("trl"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not _has_trl(), reason="TRL is not installed here; the main environment has it")
def test_trl_decides_what_is_expected(tmp_path, monkeypatch):
    made = run_trl(tmp_path, monkeypatch.setattr)
    assert made == expected()


def test_what_is_expected_shows_something():
    rows = [row for _, rows in expected()["rows"] for row in rows]
    assert {"pilot", "commit", "replay"} == {source for *_, source in rows}
    assert {reward for _, _, reward, _ in rows} == {0.0, 1.0}
    assert len(expected()["rows"]) == STEPS


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(run_trl(Path(folder))) + "\n")
