"""Environments that may hang: bounded in time, unscored, and nobody else's episode is lost."""

import math
import time

import pytest
from misbehaving import Misbehaving

from rollwise.errors import ConfigError
from rollwise.tasks import hosts
from rollwise.tasks.batch import EnvironmentBatch

NAME = "misbehaving:Misbehaving"


@pytest.fixture
def make_batch():
    made = []

    def make(num_processes=1, **settings):
        made.append(EnvironmentBatch(Misbehaving, settings, num_processes=num_processes))
        return made[-1]

    yield make
    for batch in made:
        batch.close()


def test_episodes_elsewhere_go_as_they_would_here():
    batch = EnvironmentBatch(NAME, {"picture": True, "timeout_seconds": 60.0}, num_processes=2)
    first = batch.reset([{}] * 3, seeds=[5, 6, 7])
    steps = [batch.step(["x", "y", "end"]), batch.step(["raise", "z", None])]
    for i, answers in enumerate((["x", "raise"], ["y", "z"], ["end"])):
        alone = Misbehaving(picture=True)
        assert hosts._key(alone.begin({}, 5 + i)) == hosts._key(first[i])
        turns = [alone.take_turn(answer) for answer in answers]
        assert [(t.reward, t.terminated, t.truncated, t.unscored) for t in turns] == [
            (t.reward, t.terminated, t.truncated, t.unscored) for t in batch.turns[i]
        ]
        assert hosts._key(turns[-1].observation) == hosts._key(steps[1].observations[i])
    assert batch.returns == [None, 2.0, 1.0]
    assert steps[1].unscored == ["RuntimeError: broken", None, None]
    batch.close()


@pytest.mark.parametrize("how", ["hang", "sleep", "die"])
def test_a_hang_is_unscored_in_bounded_time_and_the_others_go_on(make_batch, how):
    batch = make_batch(timeout_seconds=60.0)
    batch.reset([{}] * 3, seeds=[0, 1, 2])
    batch.step(["a"] * 3)
    batch._hosts[0].timeout_seconds = 1.0
    process = batch._hosts[0]._child.process
    began = time.monotonic()
    step = batch.step(["fine", how, "fine"])
    assert time.monotonic() - began < 20
    assert process.poll() is not None
    assert (step.rewards, step.done) == ([1.0, None, 1.0], [False, True, False])
    assert ("died" if how == "die" else "timeout_seconds 1") in step.unscored[1]
    batch.step(["fine", None, "end"])
    for i in (0, 2):
        alone = Misbehaving()
        alone.begin({}, i)
        for turn in batch.turns[i]:
            assert turn.observation.text == alone.take_turn("fine").observation.text
    assert batch.returns == [3.0, None, 3.0]
    batch.reset([{}] * 3, seeds=[0, 1, 2])
    assert batch.step(["a"] * 3).unscored == [None] * 3


def test_an_episode_that_does_not_go_the_same_again_is_unscored(make_batch):
    batch = make_batch(timeout_seconds=1.0, random_from="the clock")
    batch.reset([{}, {}], seeds=[0, 1])
    step = batch.step(["die", "fine"])
    assert step.rewards == [None, None]
    assert "died" in step.unscored[0]
    assert "another episode" in step.unscored[1]


def test_an_episode_that_cannot_begin_is_unscored_from_the_start(make_batch):
    batch = make_batch(num_processes=2, timeout_seconds=1.0)
    batch.reset([{"do": "raise"}, {"do": "hang"}, {}], seeds=[0, 0, 0])
    assert batch.done == [True, True, False]
    assert batch.unscored[0] == "RuntimeError: broken"
    assert "timeout_seconds" in batch.unscored[1]
    assert batch.step([None, None, "end"]).rewards == [0.0, 0.0, 1.0]
    assert batch.returns == [None, None, 1.0]


def test_a_wrong_spec_is_an_error_everywhere(make_batch, monkeypatch):
    with pytest.raises(ConfigError, match="this spec is refused"):
        make_batch().reset([{"refuse": True}], seeds=[0])
    monkeypatch.setattr(Misbehaving, "may_hang", False)
    batch = make_batch()
    with pytest.raises(ConfigError, match="this spec is refused"):
        batch.reset([{"refuse": True}], seeds=[0])
    batch.reset([{"do": "raise"}], seeds=[0])
    assert batch.unscored == ["RuntimeError: broken"]


def test_what_cannot_go_to_another_process_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="num_processes is 0"):
        EnvironmentBatch(NAME, num_processes=0)
    with pytest.raises(ConfigError, match="plain values"):
        EnvironmentBatch(NAME, {"random_from": math.inf.is_integer})
    with pytest.raises(ConfigError, match="a function cannot go to"):
        EnvironmentBatch(lambda: Misbehaving())
    monkeypatch.setattr(Misbehaving, "__module__", "__main__")
    with pytest.raises(ConfigError, match="may_hang = False"):
        EnvironmentBatch(NAME)
