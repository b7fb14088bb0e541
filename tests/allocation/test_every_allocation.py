"""What holds for every allocation, whatever the rewards: it ends, it counts, it keeps groups whole, it resumes."""

import copy
import json
import math

import numpy as np
import pytest
from core_helpers import pilot_commit, row_key
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import (
    Belief,
    ConfigError,
    DynamicSampling,
    HistorySkipping,
    Rollout,
    RolloutScheduler,
    SuccessiveElimination,
    Uniform,
)
from rollwise.allocation import ALLOCATIONS

#: Small settings of every allocation, each with the most rounds that a step may take.
CASES = {
    "uniform": [(Uniform(train_prompts=3, num_rollouts=2), 1)],
    "belief": [(Belief(train_prompts=2, first_rollouts=2, second_rollouts=2, cooldown_steps=2), 2)],
    "pilot_commit": [
        (pilot_commit(pilot_rollouts=2, commit_rollouts=1, pilot_prompts=3, max_pilot_rounds=3), 4),
        (pilot_commit(pilot_rollouts=2, commit_rollouts=1, bind_pilots=True, max_pilot_rounds=2), 3),
        (pilot_commit(pilot_rollouts=3, commit_rollouts=1, solved_prompts="remove", easy_prompts="remove"), 11),
    ],
    "dynamic_sampling": [
        (DynamicSampling(train_prompts=2, num_rollouts=2, max_rounds=3), 3),
        (DynamicSampling(train_prompts=2, num_rollouts=3, round_prompts=3, max_rounds=2, at_bound="stop"), 2),
    ],
    "history_skipping": [
        (HistorySkipping(train_prompts=3, num_rollouts=2, explore_easy=0.3, explore_hard=0.0), 1),
        (HistorySkipping(train_prompts=2, num_rollouts=2, target_zero_variance=0.25, max_skips_factor=2), 1),
    ],
    "successive_elimination": [
        (SuccessiveElimination(train_prompts=3, round_rollouts=2, max_rounds=3, min_successes=1, min_failures=1), 3),
        (SuccessiveElimination(train_prompts=2, round_rollouts=3, max_rounds=2, group_rollouts=2), 2),
    ],
}
PARAMETERS = [
    pytest.param(allocation, rounds, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, (allocation, rounds) in enumerate(cases)
]


def test_every_allocation_is_here():
    assert {name: type(cases[0][0]) for name, cases in CASES.items()} == ALLOCATIONS


@pytest.mark.parametrize("name", [name for name in CASES if name != "uniform"])
def test_all_but_uniform_choose_their_prompts_themselves(name):
    scheduler = RolloutScheduler(range(5), allocation=CASES[name][0][0])
    with pytest.raises(ConfigError, match="ask without `prompts`"):
        scheduler.ask(prompts=[1])
    scheduler.state_dict()  # no step is open
    assert scheduler.ask()


def rollouts_of(requests, palette, key):
    """Rollouts with rewards drawn from `palette`; some have no tokens that carry loss."""
    rng = np.random.default_rng(key)
    return [
        Rollout(
            r.prompt_id, palette[rng.integers(len(palette))], num_tokens=2, num_loss_tokens=2 * (rng.random() < 0.9)
        )
        for r in requests
        for _ in range(r.num_rollouts)
    ]


def watch(scheduler):
    """All groups that the allocator hands out, checked as they come."""
    taken, take = [], scheduler.allocator.take
    seen = set()

    def checked(step):
        groups = take(step)
        assert len({group.prompt for group in groups}) == len(groups)
        for group in groups:
            assert {rollout.prompt_id for rollout in group.rollouts} == {scheduler.prompt_ids[group.prompt]}
            assert not seen & {id(rollout) for rollout in group.rollouts}, "trained twice"
            seen.update(id(rollout) for rollout in group.rollouts)
        taken.extend(groups)  # keeps them alive, so that ids stay unique
        return groups

    scheduler.allocator.take = checked
    return taken


def resumed(scheduler, make):
    state = scheduler.state_dict()
    rollouts = copy.deepcopy(state.pop("rollouts"))
    again = make()
    again.load_state_dict(json.loads(json.dumps(state)) | {"rollouts": rollouts})
    assert json.dumps(again.state_dict() | {"rollouts": []}) == json.dumps(state | {"rollouts": []})
    return again


def figures(scheduler):
    return {name: -1.0 if math.isnan(value) else value for name, value in scheduler.metrics().items()}


@pytest.mark.parametrize(("allocation", "most_rounds"), PARAMETERS)
@settings(max_examples=40, deadline=None)
@given(
    num_prompts=st.integers(1, 12),
    palette=st.lists(st.sampled_from([0.0, 1.0, 0.5, math.nan, math.inf, None]), min_size=1, max_size=4),
    skipped_steps=st.lists(st.sampled_from([0, 0, 0, 1, 6]), min_size=1, max_size=8),
    resumes=st.sets(st.integers(0, 7), max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_run(allocation, most_rounds, num_prompts, palette, skipped_steps, resumes, seed):
    def make():
        return RolloutScheduler([f"p{i}" for i in range(num_prompts)], allocation=allocation, seed=seed)

    schedulers = [make()]  # the run, and its copies that were resumed on the way
    taken, told, trained, step = watch(schedulers[0]), [], 0, -1
    for number, skipped in enumerate(skipped_steps):
        if number in resumes:
            schedulers.append(resumed(schedulers[0], make))
        step += 1 + skipped
        for turn in range(most_rounds + 1):
            asks = [scheduler.ask(step) for scheduler in schedulers]
            assert all(requests == asks[0] for requests in asks)
            if not asks[0]:
                break
            assert turn < most_rounds, "the step does not end"
            assert len({request.prompt_id for request in asks[0] if request.purpose != "commit"}) == len(
                [request for request in asks[0] if request.purpose != "commit"]
            )
            for scheduler in schedulers:
                rollouts = rollouts_of(asks[0], palette, [seed, step, turn])
                scheduler.tell(rollouts)
                told += rollouts if scheduler is schedulers[0] else []
            assert schedulers[0].ledger.totals()["rollouts_generated"] == len(told)
        batches = [scheduler.batch() for scheduler in schedulers]
        assert all(list(map(row_key, b.rows)) == list(map(row_key, batches[0].rows)) for b in batches)

        scheduler, rows = schedulers[0], batches[0].rows
        trained += len(rows)
        totals, waiting = scheduler.ledger.totals(), scheduler.allocator.waiting()
        assert totals["rollouts_generated"] == len(told) == sum(scheduler.ledger.by_outcome().values())
        assert totals["rollouts_trained"] == trained
        assert totals["rollouts_pending"] == sum(len(group.rollouts) for group in waiting)
        assert all(record["rollouts"] >= 0 for record in scheduler.ledger.records())
        in_groups = {id(rollout) for group in taken for rollout in group.rollouts}
        assert all(id(row.rollout) in in_groups and math.isfinite(row.advantage) for row in rows)
        for other in schedulers[1:]:
            assert other.stop_reason == scheduler.stop_reason
            assert figures(other) == figures(scheduler)
            assert other.ledger.records() == scheduler.ledger.records()
        assert all(math.isfinite(value) for value in scheduler.metrics().values())
