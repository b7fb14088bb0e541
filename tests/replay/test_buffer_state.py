"""The buffer after a resume: the same rollouts in the same slots, hence the same draws, on every path of the index."""

import json

import numpy as np
import pytest
from core_helpers import play_step, row_key

from rollwise import Replay, ReplayBuffer, Rollout, RolloutScheduler, StateError
from rollwise.replay import priority_index


@pytest.fixture(params=[(2048, 131_072), (0, 131_072), (0, 0)], ids=["race", "blocks", "rows"])
def path(request, monkeypatch):
    """How the index draws. A race does not depend on slots; the others do."""
    race, search = request.param
    monkeypatch.setattr(priority_index, "_RACE_UP_TO", race)
    monkeypatch.setattr(priority_index, "_RACE_PER_DRAW", 16 if race else 0)
    monkeypatch.setattr(priority_index, "_SEARCH_UP_TO", search)


def resumed(buffer, replay=None):
    state = json.loads(json.dumps(buffer.state_dict()))
    return ReplayBuffer.from_state(replay or buffer.settings, state, buffer.rollouts)


def new_rollouts(step, generator, num_rollouts=40):
    births = np.maximum(0, step - generator.integers(0, 4, num_rollouts)).tolist()
    advantages = (generator.normal(size=num_rollouts) * (generator.random(num_rollouts) > 0.1)).tolist()
    return [
        Rollout((step, i), 1.0, birth_step=birth, advantage=advantage, nbytes=int(advantage * 100) ** 2)
        for i, (birth, advantage) in enumerate(zip(births, advantages, strict=True))
    ]


SETTINGS = {
    "age": {"max_age_steps": 9, "decay_tau_steps": 2.0},
    "steep": {"max_age_steps": 12, "decay_tau_steps": 0.02, "alpha": 1.0},  # 50 nats a step: the offset moves
    "count": {"max_age_steps": None, "capacity_rollouts": 700},
    "bytes": {"max_age_steps": 50, "capacity_bytes": 2_000_000, "epsilon": 0.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_buffer_draws_the_same_to_the_end(path, name):
    """Births out of order, holes, and holes closed, before the resume and after it."""
    generator, buffer = np.random.default_rng(0), ReplayBuffer(Replay(**SETTINGS[name]))
    copies, closed = [], 0
    for step in range(120):
        if step % 25 == 20:
            copies.append(resumed(buffer))
        rollouts = new_rollouts(step, generator)
        num_draws = int(generator.integers(0, 60))
        next_slot = buffer._next_slot
        drawn = buffer.draw(num_draws, step, np.random.default_rng(step))
        buffer.insert(rollouts)
        closed += buffer._next_slot < next_slot
        for copy in copies:
            again = copy.draw(num_draws, step, np.random.default_rng(step))
            assert [r.prompt_id for r in again] == [r.prompt_id for r in drawn]
            copy.insert(rollouts)
            assert copy.state_dict() == buffer.state_dict()
            assert len(copy) == len(buffer)
            assert copy.nbytes == buffer.nbytes
    assert closed >= 2
    assert [r.prompt_id for r in copies[0].rollouts] == [r.prompt_id for r in buffer.rollouts]
    if name == "steep":
        assert buffer.state_dict()["offset"] > 4000


def test_slots_are_not_used_up():
    """Rollouts come and go for long; the room stays in proportion to what is held."""
    buffer, most = ReplayBuffer(Replay(max_age_steps=2)), 0
    for step in range(2000):
        buffer.insert([Rollout(i, 1.0, birth_step=step, advantage=1.0) for i in range(20)])
        assert len(buffer.draw(5, step, np.random.default_rng(step))) == 5
        most = max(most, len(buffer._units_N))
    assert len(buffer) == 60
    assert most < 3000
    assert sum(isinstance(unit, Rollout) for unit in buffer._units_N) == 60  # what left can be freed


def test_nothing_held_is_a_state_too():
    buffer = ReplayBuffer(Replay())
    assert buffer.state_dict()["slots"] == []
    assert len(resumed(buffer)) == 0
    buffer.insert([Rollout("p", 1.0, birth_step=0, advantage=1.0)])
    buffer.evict(1000)
    again = resumed(buffer)
    for one in (buffer, again):
        one.insert([Rollout("q", 1.0, birth_step=1000, advantage=1.0)])
    state = buffer.state_dict()
    assert again.state_dict() == state
    assert {key: state[key] for key in state if key != "settings"} == {"slots": [[1, 1]], "next_slot": 2, "offset": 0.0}


def test_a_state_of_other_rollouts_is_refused():
    buffer = ReplayBuffer(Replay())
    buffer.insert([Rollout("p", 1.0, birth_step=0, advantage=1.0)] * 3)
    with pytest.raises(StateError, match="slots for 3 rollouts, and 2 are saved"):
        ReplayBuffer.from_state(buffer.settings, buffer.state_dict(), buffer.rollouts[:2])


def test_other_settings_after_the_resume(path):
    """A steeper decay gives keys far beyond the saved offset; a smaller capacity drops the oldest."""
    buffer, generator = ReplayBuffer(Replay(max_age_steps=None, decay_tau_steps=1000.0)), np.random.default_rng(1)
    for step in range(10**5, 10**5 + 20):
        buffer.insert(new_rollouts(step, generator))
    steeper = resumed(buffer, Replay(max_age_steps=None, decay_tau_steps=0.1, alpha=1.0, capacity_rollouts=100))
    assert len(steeper) == 100
    youngest = sorted(r.birth_step for r in buffer.rollouts)[-100:]
    assert sorted(r.birth_step for r in steeper.rollouts) == youngest
    drawn = [r.birth_step for r in steeper.draw(100, 10**5 + 20, generator)]
    assert sorted(drawn) == youngest
    assert np.mean(drawn[:10]) > np.mean(drawn[-10:])


def test_a_resumed_scheduler_draws_the_same(path):
    def new_scheduler():
        replay = Replay(ratio=1.0, warmup_steps=2, max_age_steps=5, decay_tau_steps=2.0)
        return RolloutScheduler(range(40), replay=replay, seed=3)

    def reward(request, i, step):
        return float((request.prompt_id + 3 * i + step) % 5 < 2)

    def play(scheduler, num_steps):
        return [[row_key(row) for row in play_step(scheduler, reward)[1].rows] for _ in range(num_steps)]

    whole, stopped = new_scheduler(), new_scheduler()
    batches = play(whole, 20)
    assert play(stopped, 9) == batches[:9]
    state = stopped.state_dict()
    state["buffer"] = json.loads(json.dumps(state["buffer"]))
    again = new_scheduler()
    again.load_state_dict(state)
    assert play(again, 11) == batches[9:]
    assert any(row[-1] == "replay" for row in batches[-1])
