"""The `rollwise:` block: what it becomes, and what it refuses. Needs neither verl nor Ray."""

import dataclasses
from importlib import resources

import pytest
import yaml

from rollwise import Belief, ConfigError, DynamicSampling, PilotCommit, Replay, Uniform
from rollwise.replay.priority import abs_reward
from rollwise.verl.settings import RollwiseSettings


def settings(**block):
    return RollwiseSettings.from_block(block)


def test_without_a_block_nothing_is_on():
    for block in (None, {}):
        nothing = RollwiseSettings.from_block(block)
        assert not nothing.is_active
        assert not nothing.drops_zero_variance
        assert nothing.allocation_settings(4, 8) == Uniform(train_prompts=4, num_rollouts=8)


def test_the_shipped_block_is_the_defaults():
    """The YAML repeats the classes' defaults, so that verl's users can override them without a plus sign."""
    block = yaml.safe_load(resources.files("rollwise.verl.config.rollwise").joinpath("block.yaml").read_text())
    assert set(block) == {field.name for field in dataclasses.fields(RollwiseSettings)}
    replay = block.pop("replay")
    assert replay == Replay(ratio=0.0).as_dict()
    ours = dataclasses.asdict(RollwiseSettings())
    assert block == {name: value for name, value in ours.items() if name != "replay"}
    assert not RollwiseSettings.from_block(block | {"replay": replay}).is_active


def test_pilots_are_a_quarter_of_the_group_unless_given():
    assert settings(allocation={"name": "pilot_commit"}).allocation_settings(4, 16) == PilotCommit(
        train_prompts=4, pilot_rollouts=4, commit_rollouts=12
    )
    given = settings(allocation={"name": "pilot_commit", "pilot_rollouts": 6, "p_upper": 0.9}, success_threshold=0.5)
    assert given.allocation_settings(4, 16) == PilotCommit(
        train_prompts=4, pilot_rollouts=6, commit_rollouts=10, p_upper=0.9, success_threshold=0.5
    )
    belief = settings(allocation={"name": "belief", "half_life_steps": 9}).allocation_settings(4, 8, [0, 1])
    assert belief == Belief(train_prompts=4, first_rollouts=2, second_rollouts=6, half_life_steps=9, buckets=[0, 1])
    assert settings(allocation={"name": "dynamic_sampling"}).allocation_settings(4, 8) == DynamicSampling(
        train_prompts=4, num_rollouts=8
    )


def test_replay_takes_the_settings_of_its_class_and_a_priority_by_its_path():
    block = {"ratio": 1.0, "priority": "rollwise.replay.priority.abs_reward", "decay_tau_steps": "auto"}
    assert settings(replay=block).replay_settings() == Replay(ratio=1.0, priority=abs_reward, decay_tau_steps="auto")
    assert settings(replay=block).is_active
    assert settings(replay=block).drops_zero_variance
    assert not settings(replay=block, drop_zero_variance=False).drops_zero_variance


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"replay_ratio": 0.5}, r"has \['replay_ratio'\]; it knows .*'replay'"),
        ({"replay": {"rate": 0.5}}, r"rollwise.replay has \['rate'\]"),
        ({"replay": {"ratio": -1}}, "rollwise.replay.ratio is -1"),
        ({"replay": {"priority": "nowhere.at_all"}}, "rollwise.replay.priority is 'nowhere.at_all'.*head node|dotted"),
        ({"allocation": {"name": "pilots"}}, "allocation.name is 'pilots'; it must be one of .*pilot_commit"),
        ({"payload_store": "redis"}, "payload_store is 'redis'"),
        ({"payload_shards": 0}, "payload_shards is 0"),
        ({"budget_rollouts": 0}, "budget_rollouts is 0"),
        ({"poll_seconds": 0}, "poll_seconds is 0"),
        ({"ess_bound": 2}, "ess_bound is 2"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(block, message):
    with pytest.raises(ConfigError, match=message):
        RollwiseSettings.from_block(block)


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ({"name": "pilot_commit", "train_prompts": 3}, "train_prompts is data.train_batch_size"),
        ({"name": "uniform", "num_rollouts": 3}, "num_rollouts is actor_rollout_ref.rollout.n"),
        ({"name": "pilot_commit", "commit_rollouts": 3}, "commit_rollouts is actor_rollout_ref.rollout.n less"),
        ({"name": "pilot_commit", "pilot_rollouts": 8}, "pilot_rollouts is 8 of actor_rollout_ref.rollout.n 8"),
        ({"name": "pilot_commit", "p_lower": 2}, "rollwise.allocation: p_lower 2"),
        ({"name": "dynamic_sampling", "p_lower": 0.1}, "does not know; it knows .*max_rounds"),
    ],
)
def test_settings_of_an_allocation_that_are_verls_or_unknown_are_refused(allocation, message):
    with pytest.raises(ConfigError, match=message):
        settings(allocation=allocation).allocation_settings(4, 8)
