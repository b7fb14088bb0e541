"""Uniform allocation is plain GRPO: the same number for every prompt of a batch, once per step."""

import pytest
from core_helpers import always, answer, coin, play_step

from rollwise import ConfigError, RolloutError, RolloutScheduler, Uniform


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"num_rollouts": -8}, "num_rollouts is -8"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Uniform(**options)


def test_a_group_of_one_has_no_advantage_unless_a_critic_gives_one():
    alone = Uniform(train_prompts=2, num_rollouts=1)
    with pytest.raises(ConfigError, match="num_rollouts is 1; .* at least 2"):
        RolloutScheduler("ab", allocation=alone)
    scheduler = RolloutScheduler("ab", allocation=alone, baseline="critic")
    _, batch = play_step(scheduler, coin(0.5))
    assert len(batch.rows) == 2


def test_one_request_per_prompt_then_nothing():
    scheduler = RolloutScheduler(range(20), allocation=Uniform(train_prompts=5, num_rollouts=4))
    requests = scheduler.ask()
    assert len({r.prompt_id for r in requests}) == 5
    assert {(r.num_rollouts, r.purpose) for r in requests} == {(4, "uniform")}
    scheduler.tell(answer(requests, coin(0.5), 0))
    assert scheduler.ask() == []
    assert scheduler.ask() == []


def test_every_prompt_once_per_epoch():
    scheduler = RolloutScheduler("abcdef", allocation=Uniform(train_prompts=2, num_rollouts=2))
    for _ in range(4):
        epoch = [r.prompt_id for _ in range(3) for r in play_step(scheduler, coin(0.5))[0][0]]
        assert sorted(epoch) == list("abcdef")


def test_it_is_the_default():
    requests = RolloutScheduler(range(100)).ask()
    assert [r.num_rollouts for r in requests] == [Uniform().num_rollouts] * Uniform().train_prompts
    assert {r.purpose for r in requests} == {"uniform"}


def test_fewer_prompts_than_a_batch():
    scheduler = RolloutScheduler(["only", "two"], allocation=Uniform(train_prompts=5, num_rollouts=2))
    for _ in range(3):
        asks, _ = play_step(scheduler, coin(0.5))
        assert sorted(r.prompt_id for r in asks[0]) == ["only", "two"]


def test_a_data_loader_may_choose_the_prompts():
    scheduler = RolloutScheduler("abcdef", allocation=Uniform(train_prompts=2, num_rollouts=2))
    asks = []
    for prompts in (["f", "a", "f"], ["b"]):  # a loader may repeat one, or come with a short last batch
        requests = scheduler.ask(prompts=prompts)
        asks.append([r.prompt_id for r in requests])
        scheduler.tell(answer(requests, lambda request, i, step: float(i), 0))
        assert scheduler.ask(prompts=prompts) == []
        assert len(scheduler.batch().rows) == 2 * len(prompts)
    assert asks == [["f", "a", "f"], ["b"]]
    assert scheduler.ask(prompts=[]) == []  # nothing, not the last step's groups again
    assert scheduler.batch().rows == ()


def test_an_unknown_prompt_is_refused_and_the_step_can_still_be_asked_for():
    scheduler = RolloutScheduler("abcdef", allocation=Uniform(train_prompts=2, num_rollouts=2))
    with pytest.raises(RolloutError, match="'z' is unknown"):
        scheduler.ask(7, prompts=["a", "z"])
    assert scheduler.step == -1
    scheduler.state_dict()  # no step is open
    assert [r.prompt_id for r in scheduler.ask(3, prompts=["a", "b"])] == ["a", "b"]
    assert scheduler.step == 3


def test_every_group_is_trained_on_whole_and_stands_alone():
    rewards = {"a": [0, 1], "b": [3, 5], "c": [2, 2]}
    scheduler = RolloutScheduler("abc", allocation=Uniform(train_prompts=3, num_rollouts=2), ddof=0, std_epsilon=0.0)
    _, batch = play_step(scheduler, lambda request, i, step: rewards[request.prompt_id][i])
    rows = {(row.rollout.prompt_id, row.rollout.reward): row for row in batch.rows}
    assert {key: row.advantage for key, row in rows.items()} == {("a", 0): -1, ("a", 1): 1, ("b", 3): -1, ("b", 5): 1}
    assert {key[0]: (row.rollout.group_mean, row.rollout.group_std) for key, row in rows.items()} == {
        "a": (0.5, 0.5),
        "b": (4.0, 1.0),
    }


def test_it_never_runs_out_of_prompts_but_of_patience():
    scheduler = RolloutScheduler("ab", allocation=Uniform(train_prompts=2, num_rollouts=2), patience_prompts=6)
    for expected in (False, False, True):
        play_step(scheduler, always(1.0))
        assert bool(scheduler.stop_reason) == expected
