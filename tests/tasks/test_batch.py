"""Environments that are stepped together do what each would do alone."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from rollwise.errors import ConfigError, ProtocolError
from rollwise.tasks.batch import EnvironmentBatch
from rollwise.tasks.frozen_lake import FrozenLake

MOVES = ("left", "down", "right", "up", "nonsense")


def test_a_batch_plays_as_its_environments_alone_do():
    rng = np.random.default_rng(0)
    lake = FrozenLake(slippery=True, max_turns=8)
    batch = EnvironmentBatch("frozen_lake", {"slippery": True, "max_turns": 8})
    makers = (FrozenLake, lambda **settings: FrozenLake(**settings))
    batches = [batch, *(EnvironmentBatch(make, {"slippery": True, "max_turns": 8}) for make in makers)]
    for size, batch in zip(
        (12, 5, 20, 7, 7), (*batches[:1] * 3, *batches[1:]), strict=True
    ):  # environments are used again, and more are made
        specs = [lake.draw_spec("4x4", rng) for _ in range(size)]
        answers = rng.choice(MOVES, (8, size))
        batch.reset(specs, seeds=range(size))
        for turn in answers:
            step = batch.step(list(turn))
        for i, spec in enumerate(specs):
            lake.begin(spec, seed=i)
            alone = []
            for answer in answers[:, i]:
                alone.append(lake.take_turn(answer))
                if alone[-1].done:
                    break
            assert batch.turns[i] == alone
            assert batch.returns[i] == pytest.approx(sum(turn.reward for turn in alone))
            assert step.observations[i] == alone[-1].observation
        assert all(step.done)
        assert step.unscored == [None] * size


def test_a_finished_episode_needs_no_action_and_gets_no_more_reward():
    batch = EnvironmentBatch("frozen_lake")
    first = batch.reset([{"map": "SG"}, {"map": "SFG"}], seeds=[0, 1])
    assert [observation.text for observation in first] == ["PG", "PFG"]
    step = batch.step(["right", "right"])
    assert (step.rewards, step.done) == ([1.0, 0.0], [True, False])
    step = batch.step([None, "right"])
    assert (step.rewards, step.done) == ([0.0, 1.0], [True, True])
    assert batch.returns == [1.0, 1.0]


def test_wrong_calls_are_refused():
    batch = EnvironmentBatch("frozen_lake")
    with pytest.raises(ProtocolError, match="reset"):
        batch.step(["left"])
    with pytest.raises(ConfigError, match="2 specs but 1 seeds"):
        batch.reset([{"map": "SG"}, {"map": "SG"}], seeds=[0])
    batch.reset([{"map": "SFG"}], seeds=[0])
    with pytest.raises(ConfigError, match="2 actions but 1"):
        batch.step(["left", "left"])
    with pytest.raises(ProtocolError, match="episode 0"):
        batch.step([None])
    batch.close()


def test_the_benchmark_runs_every_case():
    path = Path(__file__).parents[2] / "benchmarks" / "environments.py"
    spec = importlib.util.spec_from_file_location("environments_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for name, settings, level in benchmark.CASES.values():
        measured = benchmark.measure(name, settings, level, episodes=4, turns=3, repeats=2)
        assert measured["turns"] == 12
        assert measured["again_ms"] > 0
