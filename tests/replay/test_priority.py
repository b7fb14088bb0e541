import math
from collections import Counter

import numpy as np
import pytest

from rollwise import ConfigError, PilotCommit, Replay, ReplayBuffer, Rollout, RolloutError, RolloutScheduler, StateError
from rollwise.replay.priority import PRIORITIES, abs_reward, named_priority
from rollwise.storage import load_state, save_state

SMALL = {"warmup_steps": 0, "max_age_steps": None, "epsilon": 0.0, "alpha": 1.0}


def rollout(prompt_id, *, reward=0.0, advantage=1.0, birth_step=0, **fields):
    return Rollout(prompt_id, reward, birth_step=birth_step, advantage=advantage, **fields)


def share(buffer, *, step=1, draws=4000):
    """How often each prompt comes first in a draw of one."""
    generator = np.random.default_rng(0)
    counts = Counter(buffer.draw(1, step, generator)[0].prompt_id for _ in range(draws))
    return {prompt: count / draws for prompt, count in counts.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("advantage", [2.0, 0.5]),
        ("positive_advantage", [0.0, 0.5]),
        ("reward", [0.0, 3.0]),
        ("abs_reward", [1.0, 3.0]),
        ("group_std", [0.5, 0.25]),
        ("td_error", [0.1, 0.2]),
        ("uniform", [1.0, 1.0]),
    ],
)
def test_values_by_hand(name, expected):
    rollouts = [
        rollout("a", reward=-1.0, advantage=-2.0, group_std=0.5, td_error=-0.1),
        rollout("b", reward=3.0, advantage=0.5, group_std=0.25, td_error=0.2),
    ]
    assert PRIORITIES[name](rollouts).tolist() == expected


@pytest.mark.parametrize("name", ["advantage", "reward", "abs_reward", "group_std", "td_error"])
def test_draws_follow_the_priority(name):
    fields = {"reward": 1.0, "advantage": 1.0, "group_std": 1.0, "td_error": 1.0}
    varied = {"advantage": "advantage", "group_std": "group_std", "td_error": "td_error"}.get(name, "reward")
    buffer = ReplayBuffer(Replay(priority=name, **SMALL))
    buffer.insert([rollout(value, **(fields | {varied: value})) for value in (1.0, 3.0, 6.0)])
    observed = share(buffer)
    assert observed[1.0] == pytest.approx(0.1, abs=0.02)
    assert observed[6.0] == pytest.approx(0.6, abs=0.03)


def test_a_function_of_ones_own():
    buffer = ReplayBuffer(Replay(priority=lambda rollouts: [len(r.prompt_id) for r in rollouts], **SMALL))
    buffer.insert([rollout("a"), rollout("bbb")])
    assert share(buffer)["bbb"] == pytest.approx(0.75, abs=0.03)


def test_a_function_is_found_by_its_dotted_path():
    assert named_priority("rollwise.replay.priority.abs_reward") is abs_reward
    assert named_priority("group_std") == "group_std"


@pytest.mark.parametrize("path", ["no_such_module.priority", "rollwise.replay.priority.no_such_function"])
def test_a_dotted_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match=f"priority is '{path}', and there is no such function"):
        named_priority(path)


@pytest.mark.parametrize(
    "function", [lambda r: [-1.0] * len(r), lambda r: [math.nan] * len(r), lambda r: [1.0], lambda r: [[1.0]] * len(r)]
)
def test_a_function_that_gives_no_priorities_is_refused(function):
    buffer = ReplayBuffer(Replay(priority=function))
    with pytest.raises(ConfigError, match="must give one finite number of at least 0 for each"):
        buffer.insert([rollout("a"), rollout("b")])
    assert len(buffer) == 0


def test_a_missing_td_error_is_named():
    with pytest.raises(RolloutError, match="rollout of prompt 'b' has no TD error"):
        ReplayBuffer(Replay(priority="td_error")).insert([rollout("a", td_error=1.0), rollout("b")])


def test_recency_draws_the_newest_first_and_ties_at_random():
    buffer = ReplayBuffer(Replay(priority="recency", max_age_steps=None))
    buffer.insert([rollout((step, i), birth_step=step) for step in (5, 7, 6) for i in range(4)])
    firsts = set()
    for seed in range(40):
        drawn = [r.prompt_id for r in buffer.draw(8, 8, np.random.default_rng(seed))]
        assert [step for step, _ in drawn] == [7] * 4 + [6] * 4
        firsts.add(drawn[0])
    assert firsts == {(7, i) for i in range(4)}


# --- newcomers and uses -------------------------------------------------------------------------------------------


def test_newcomers_enter_at_the_maximum_until_they_have_been_drawn():
    buffer = ReplayBuffer(Replay(newcomers="max", **SMALL))
    buffer.insert([rollout("large", advantage=8.0)])
    buffer.insert([rollout("small", advantage=1.0)])
    generator = np.random.default_rng(0)
    seen = [buffer.draw(1, 1, generator)[0].prompt_id for _ in range(3000)]
    first = seen.index("small")
    assert first < 12  # as likely as the large one at first
    assert seen[first + 1 :].count("small") / (len(seen) - first - 1) == pytest.approx(1 / 9, abs=0.02)


def test_a_newcomer_that_was_given_a_priority_after_its_first_draw_keeps_it():
    buffer = ReplayBuffer(Replay(newcomers="max", **SMALL))
    both = [rollout("large", advantage=8.0), rollout("small", advantage=1.0)]
    buffer.insert(both)
    buffer.draw(2, 1, np.random.default_rng(0))
    buffer.set_priorities(both, [np.nan, 8.0])
    buffer.draw(2, 1, np.random.default_rng(0))
    assert buffer.draw_probabilities() == pytest.approx([0.5, 0.5])


def test_newcomers_own_priority_is_the_default():
    buffer = ReplayBuffer(Replay(**SMALL))
    buffer.insert([rollout("large", advantage=8.0)])
    buffer.insert([rollout("small", advantage=1.0)])
    assert share(buffer)["small"] == pytest.approx(1 / 9, abs=0.02)


@pytest.mark.parametrize("max_uses", [1, 3])
def test_a_rollout_leaves_after_its_last_use(max_uses):
    buffer = ReplayBuffer(Replay(max_uses=max_uses, **SMALL))
    buffer.insert([rollout(i, birth_step=i % 3, nbytes=10) for i in range(20)])
    drawn = Counter()
    generator = np.random.default_rng(0)
    while len(buffer):
        drawn.update(r.prompt_id for r in buffer.draw(7, 3, generator))
    assert drawn == dict.fromkeys(range(20), max_uses)
    assert buffer.nbytes == 0
    assert buffer.rollouts == []
    buffer.insert([rollout("new", birth_step=1)])  # births that had emptied are taken up again
    assert [r.prompt_id for r in buffer.draw(5, 3, generator)] == ["new"]


# --- groups -------------------------------------------------------------------------------------------------------


def group(prompt_id, advantages, birth_step=0):
    return [rollout(prompt_id, advantage=a, birth_step=birth_step, nbytes=10) for a in advantages]


def test_groups_are_drawn_whole_by_their_mean_priority():
    buffer = ReplayBuffer(Replay(unit="group", **SMALL))
    buffer.insert(group("a", [1.0, -1.0]) + group("b", [3.0, -3.0, 3.0]))
    assert len(buffer) == 5
    generator = np.random.default_rng(0)
    draws = [[r.prompt_id for r in buffer.draw(1, 1, generator)] for _ in range(3000)]
    assert sorted(map(tuple, {tuple(d) for d in draws})) == [("a", "a"), ("b", "b", "b")]
    assert sum(d[0] == "b" for d in draws) / len(draws) == pytest.approx(0.75, abs=0.03)
    both = [r.prompt_id for r in buffer.draw(2, 1, generator)]
    assert sorted(both) == ["a", "a", "b", "b", "b"]


def test_a_group_is_as_old_as_its_oldest_rollout():
    buffer = ReplayBuffer(Replay(unit="group", max_age_steps=3))
    buffer.insert(group("a", [1.0], birth_step=2) + group("a", [1.0], birth_step=4))
    assert len(buffer.draw(1, 5, np.random.default_rng(0))) == 2
    assert buffer.draw(1, 6, np.random.default_rng(0)) == []
    assert len(buffer) == 0


def test_capacity_counts_rollouts_and_bytes_of_groups():
    buffer = ReplayBuffer(Replay(unit="group", max_age_steps=None, capacity_rollouts=5))
    for step in range(4):
        buffer.insert(group(step, [1.0, 1.0], birth_step=step))
    assert [r.prompt_id for r in buffer.rollouts] == [2, 2, 3, 3]
    buffer = ReplayBuffer(Replay(unit="group", max_age_steps=None, capacity_bytes=50))
    for step in range(4):
        buffer.insert(group(step, [1.0, 1.0], birth_step=step))
    assert [r.prompt_id for r in buffer.rollouts] == [2, 2, 3, 3]
    assert buffer.nbytes == 40


@pytest.mark.parametrize(
    "settings",
    [
        {"unit": "group", "priority": "group_std"},
        {"newcomers": "max"},
        {"max_uses": 2},
        {"unit": "group", "newcomers": "max", "max_uses": 3},
        {"priority": "recency"},
    ],
)
def test_resumed_draws_are_those_of_the_run_that_was_never_stopped(tmp_path, settings):
    def scheduler():
        return RolloutScheduler(
            range(30),
            allocation=PilotCommit(train_prompts=3, pilot_rollouts=2, commit_rollouts=4, solved_prompts="next_epoch"),
            replay=Replay(ratio=1.0, warmup_steps=1, **settings),
            seed=3,
        )

    def play(one, steps):
        batches = []
        for _ in range(steps):
            while requests := one.ask():
                told = [Rollout(r.prompt_id, 0.0, num_tokens=3) for r in requests for _ in range(r.num_rollouts)]
                for i, each in enumerate(told):
                    each.reward = float((each.prompt_id * 7 + i * 13 + one.step) % 5 < 2)
                one.tell(told)
            batches.append([(row.rollout.prompt_id, row.source, row.age_steps) for row in one.batch().rows])
        return batches

    whole = scheduler()
    expected = play(whole, 16)
    assert any(source == "replay" for batch in expected for _, source, _ in batch)
    stopped = scheduler()
    assert play(stopped, 8) == expected[:8]
    save_state(tmp_path, stopped.state_dict())
    resumed = scheduler()
    resumed.load_state_dict(load_state(tmp_path))
    assert play(resumed, 8) == expected[8:]


def test_another_unit_than_the_saved_one_is_refused():
    groups = ReplayBuffer(Replay(unit="group"))
    groups.insert(group("a", [1.0, 1.0]))
    with pytest.raises(StateError, match="the saved buffer holds groups, this run replays by rollout"):
        ReplayBuffer.from_state(Replay(), groups.state_dict(), groups.rollouts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"priority": "biggest"}, "priority is 'biggest'; it must be one of"),
        ({"unit": "token"}, "unit is 'token'; it must be one of"),
        ({"newcomers": "min"}, "newcomers is 'min'; it must be one of"),
        ({"max_uses": 0}, "max_uses is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_bounds(settings, message):
    with pytest.raises(ConfigError, match=message):
        Replay(**settings)


def test_new_priorities_reach_those_drawn_though_the_holes_are_closed_in_between():
    buffer = ReplayBuffer(Replay(**(SMALL | {"max_age_steps": 10})))
    buffer.insert([rollout(("old", i)) for i in range(4000)] + [rollout(i, birth_step=100) for i in range(4)])
    drawn = buffer.draw(2, 100, np.random.default_rng(0))
    newcomers = [rollout(("new", i), birth_step=100) for i in range(2)]
    buffer.insert(newcomers)  # into fewer slots than the over-aged had
    assert buffer.state_dict()["next_slot"] == 6
    buffer.set_priorities([*drawn, *newcomers], [3.0, 5.0, 7.0, 9.0])
    expected = dict(zip(map(id, [*drawn, *newcomers]), [3.0, 5.0, 7.0, 9.0], strict=True))
    weights = np.array([expected.get(id(r), 1.0) for r in buffer.rollouts])
    assert buffer.draw_probabilities() == pytest.approx(weights / weights.sum())
