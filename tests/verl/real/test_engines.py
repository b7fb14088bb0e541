"""The same study on both engines: fed the same rewards, verl's scheduler decides as TRL's."""

import decisions
import pytest
from launch import launch, make_inputs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    make_inputs(folder, num_prompts=decisions.NUM_PROMPTS, levels=("sort-3",), answer=lambda problem: problem.prompt)
    return launch(
        folder,
        "engines",
        "rollwise.allocation.name=pilot_commit",
        *(f"+rollwise.allocation.{name}={value}" for name, value in decisions.ALLOCATION.items()),
        *(f"rollwise.replay.{name}={value}" for name, value in decisions.REPLAY.items()),
        f"rollwise.seed={decisions.SEED}",
        "rollwise.poll_seconds=0.1",
        f"reward.custom_reward_function.path={decisions.__file__}",
        steps=decisions.STEPS,
        prompts=decisions.TRAIN_PROMPTS,
        rollouts=decisions.ROLLOUTS,
        max_tokens=4,
    )


def test_verl_decides_what_trl_decided(run):
    assert run.exit_code == 0, run.output[-5000:]
    assert decisions.decisions(run.events) == decisions.expected()
