"""Pilot-Commit, step by step: who is piloted, who survives, who is committed to, and what it costs."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from core_helpers import always, answer, coin, count, first, pilot_commit, play_step, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import ConfigError, PilotCommit, Rollout, RolloutScheduler


def scheduler_of(num_prompts, *, seed=0, patience_prompts=1000, ddof=0, **options):
    return RolloutScheduler(
        range(num_prompts),
        allocation=pilot_commit(**options),
        seed=seed,
        ddof=ddof,
        std_epsilon=0.0,
        patience_prompts=patience_prompts,
    )


def outcomes(scheduler):
    return {name: number for name, number in scheduler.ledger.by_outcome().items() if number}


def trained_prompts(batch):
    return sorted({row.rollout.prompt_id for row in batch.rows})


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"pilot_rollouts": 0}, "pilot_rollouts is 0"),
        ({"commit_rollouts": 0}, "commit_rollouts is 0"),
        ({"pilot_prompts": 0}, "pilot_prompts is 0"),
        ({"max_pilot_rounds": 0}, "max_pilot_rounds is 0"),
        ({"max_pilot_rounds": "ten"}, "max_pilot_rounds is 'ten'; it must be a whole number of at least 1"),
        ({"retire_rollouts": 2.5}, "retire_rollouts is 2.5; it must be a whole number"),
        ({"recheck_share": "much"}, "recheck_share is 'much'; it must be between 0 and 1"),
        ({"p_lower": -0.1}, "p_lower -0.1"),
        ({"p_lower": 0.8}, "p_lower 0.8"),
        ({"p_upper": 1.1}, "p_upper 1.1"),
        ({"p_lower": math.nan}, "p_lower nan"),
        ({"max_survivor_age_steps": 0}, "max_survivor_age_steps is 0"),
        ({"max_survivor_age_steps": -1, "bind_pilots": False}, "max_survivor_age_steps is -1"),
        ({"easy_prompts": "drop"}, "easy_prompts is 'drop'"),
        ({"solved_prompts": "drop"}, "solved_prompts is 'drop'"),
        ({"survivor_selection": "least_recent"}, "survivor_selection is 'least_recent'"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PilotCommit(**options)


def test_the_defaults_are_the_papers():
    paper = PilotCommit()
    assert (paper.p_lower, paper.p_upper, paper.p_solve) == (0.125, 0.75, 1.0)
    assert (paper.pilot_rollouts, paper.commit_rollouts, paper.max_survivor_age_steps) == (16, 48, 4)
    assert paper.prompts_per_round == 3 * paper.train_prompts
    assert PilotCommit(train_prompts=7).prompts_per_round == 21
    assert PilotCommit(pilot_prompts=5).prompts_per_round == 5
    assert PilotCommit(max_survivor_age_steps=0, bind_pilots=False)


def test_it_chooses_its_prompts_itself():
    scheduler = scheduler_of(5)
    with pytest.raises(ConfigError, match="ask without `prompts`"):
        scheduler.ask(prompts=[1])
    assert scheduler.ask()  # the refused call left no trace


# --- triage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "outcome"),
    [
        (0, "too_hard"),
        (1, "trained"),  # 1/8 is p_lower itself: survives
        (6, "trained"),  # 6/8 is p_upper itself: survives
        (7, "too_easy"),
        (8, "solved"),
    ],
)
def test_triage_at_the_papers_bounds(successes, outcome):
    scheduler = scheduler_of(1)
    asks, batch = play_step(scheduler, first({0: successes}))
    assert scheduler.ledger.by_outcome()[outcome] >= 8
    assert len(asks) == (2 if outcome == "trained" else 1)
    assert bool(batch.rows) == (outcome == "trained")
    assert scheduler.pool.num_live == (0 if outcome == "solved" else 1)


@pytest.mark.parametrize(
    ("bounds", "pilots", "successes", "outcome"),
    [
        ({"p_lower": 0.1, "p_upper": 0.7}, 10, 1, "survives"),
        ({"p_lower": 0.1, "p_upper": 0.7}, 10, 7, "survives"),
        ({"p_lower": 0.1, "p_upper": 0.7}, 10, 8, "too_easy"),
        ({"p_lower": 1 / 3, "p_upper": 2 / 3}, 3, 1, "survives"),
        ({"p_lower": 1 / 3, "p_upper": 2 / 3}, 3, 2, "survives"),
        ({"p_lower": 0.0}, 8, 0, "survives"),
        ({"p_upper": 0.75, "p_solve": 0.875}, 8, 7, "solved"),  # p_solve itself
        ({"p_upper": 0.5, "p_solve": 0.5}, 8, 4, "solved"),  # solved is looked at first
        ({"p_upper": 1.0}, 8, 8, "solved"),
        ({"p_upper": 1.5, "p_solve": 2.0}, 8, 8, "survives"),  # never solved
        ({"p_lower": 0.5, "p_upper": 0.5}, 8, 4, "survives"),
        ({"p_lower": 0.5, "p_upper": 0.5}, 8, 3, "too_hard"),
        ({"p_lower": 0.5, "p_upper": 0.5}, 8, 5, "too_easy"),
    ],
)
def test_triage_at_other_bounds(bounds, pilots, successes, outcome):
    scheduler = scheduler_of(1, pilot_rollouts=pilots, **bounds)
    scheduler.tell(answer(scheduler.ask(), first(successes), 0))
    commits = scheduler.ask()
    assert bool(commits) == (outcome == "survives")
    assert outcomes(scheduler) == {("pending" if outcome == "survives" else outcome): pilots}


def test_the_success_threshold_makes_part_marks_a_success():
    scheduler = scheduler_of(1, success_threshold=0.5)
    _, batch = play_step(scheduler, lambda request, i, step: 0.5 if i < 4 else 0.4)
    assert len(batch.rows) == 12
    scheduler = scheduler_of(1)
    play_step(scheduler, lambda request, i, step: 0.5 if i < 4 else 0.4)
    assert outcomes(scheduler) == {"too_hard": 8}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("scored", "outcome"),
    [([0, 0, 0, 0], "too_hard"), ([1, 1, 1, 1], "solved"), ([1, 1, 1, 1, 0], "too_easy"), ([1, 0], "pending")],
)
def test_unscored_pilots_do_not_count_in_the_success_rate(bad, scored, outcome):
    """4 successes among 8 pilots of which 4 are unscored are a rate of 1, not of 1/2; 1 and 0 among 8 are 1/2."""
    rewards = [bad] * (8 - len(scored)) + scored
    scheduler = scheduler_of(1)
    scheduler.tell(answer(scheduler.ask(), lambda request, i, step: rewards[i], 0))
    commits = scheduler.ask()
    if outcome == "pending":
        assert commits
        assert outcomes(scheduler) == {"pending": 8}
        scheduler.tell(answer(commits, always(bad), 0))
        assert scheduler.ask() == []
        rows = scheduler.batch().rows
        assert [row.rollout.reward for row in rows] == [1, 0]
        assert [row.advantage for row in rows] == [1.0, -1.0]
        assert outcomes(scheduler) == {"trained": 2, "unscored": 10}
    else:
        assert outcomes(scheduler) == {outcome: len(scored), "unscored": 8 - len(scored)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prompt_without_any_score_is_neither_removed_nor_committed_to(bad):
    scheduler = scheduler_of(1)
    asks, batch = play_step(scheduler, always(bad))
    assert len(asks) == 1
    assert batch.rows == ()
    assert math.isnan(batch.success_rate)
    assert outcomes(scheduler) == {"unscored": 8}
    assert scheduler.pool.num_live == 1


@pytest.mark.parametrize("fate", ["easy", "solved"])
@pytest.mark.parametrize("what", ["next_epoch", "remove"])
def test_easy_and_solved_prompts_come_back_or_not(fate, what):
    options = {"easy_prompts": "next_epoch", "solved_prompts": "next_epoch", f"{fate}_prompts": what}
    successes = {0: 7 if fate == "easy" else 8} | dict.fromkeys(range(1, 6), 0)
    scheduler = scheduler_of(6, max_pilot_rounds=1, pilot_prompts=6, **options)
    piloted = [prompts_of(play_step(scheduler, first(successes))[0][0], "pilot") for _ in range(4)]
    assert sorted(piloted[0]) == [0, 1, 2, 3, 4, 5]
    for later in piloted[1:]:
        assert sorted(later) == ([0] if what == "next_epoch" else []) + [1, 2, 3, 4, 5]  # hard ones always come back


def test_too_hard_and_too_easy_prompts_wait_for_the_next_epoch():
    """In an epoch every prompt is piloted once, whatever became of it."""
    scheduler = scheduler_of(12, pilot_prompts=4, max_pilot_rounds=1)
    successes = {p: (0 if p % 2 else 7) for p in range(12)}
    epochs = [[p for _ in range(3) for p in prompts_of(play_step(scheduler, first(successes))[0][0], "pilot")]]
    epochs.append([p for _ in range(3) for p in prompts_of(play_step(scheduler, first(successes))[0][0], "pilot")])
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2


# --- commit and train -------------------------------------------------------------------------------------------------


def test_pilots_and_commits_are_one_group():
    """4 of 8 pilots and 1 of 4 commits succeed: k = 5 of G = 12."""
    scheduler = scheduler_of(3, train_prompts=1, pilot_prompts=1)

    def reward_of(request, i, step):
        return float(i < (4 if request.purpose == "pilot" else 1))

    asks, batch = play_step(scheduler, reward_of)
    assert [[(r.num_rollouts, r.purpose) for r in ask] for ask in asks] == [[(8, "pilot")], [(4, "commit")]]
    assert asks[0][0].prompt_id == asks[1][0].prompt_id
    assert [row.source for row in batch.rows] == ["pilot"] * 8 + ["commit"] * 4
    assert [row.age_steps for row in batch.rows] == [0] * 12
    for row in batch.rows:
        expected = math.sqrt(7 / 5) if row.rollout.reward else -math.sqrt(5 / 7)
        assert row.advantage == pytest.approx(expected)
        assert row.rollout.group_mean == pytest.approx(5 / 12)
    assert outcomes(scheduler) == {"trained": 12}


def test_commits_go_to_train_prompts_survivors_and_the_surplus_waits():
    scheduler = scheduler_of(20, train_prompts=2, pilot_prompts=5, pilot_every_step=False)
    asks, batch = play_step(scheduler, first(4))
    assert (count(asks[0], "pilot"), count(asks[1], "commit")) == (5 * 8, 2 * 4)
    assert trained_prompts(batch) == sorted(prompts_of(asks[1], "commit"))
    assert outcomes(scheduler) == {"trained": 24, "pending": 24}
    assert scheduler.metrics()["survivors_waiting"] == 3
    waited = set(prompts_of(asks[0], "pilot")) - set(trained_prompts(batch))

    asks, batch = play_step(scheduler, first(4))  # two of the three that wait; no pilots are needed
    assert len(asks) == 1
    assert count(asks[0], "pilot") == 0
    assert set(trained_prompts(batch)) < waited
    assert {(row.source, row.age_steps) for row in batch.rows} == {("pilot", 1), ("commit", 0)}

    asks, batch = play_step(scheduler, first(4))  # one is left: a round of pilots fills the step
    assert [count(ask, "pilot") for ask in asks] == [40, 0]
    assert not waited & set(prompts_of(asks[0], "pilot"))  # who waits with pilots is not piloted again
    assert len(trained_prompts(batch)) == 2


def test_rounds_of_pilots_go_on_until_enough_survive():
    successes = dict.fromkeys(range(40), 0)
    scheduler = scheduler_of(40, train_prompts=2, pilot_prompts=4)
    first_rounds = prompts_of(scheduler_of(40, pilot_prompts=12).ask(), "pilot")  # the same seed's order
    successes[first_rounds[5]] = successes[first_rounds[9]] = 4
    asks, batch = play_step(scheduler, first(successes))
    assert [count(ask, "pilot") for ask in asks] == [32, 32, 32, 0]
    assert prompts_of(asks[0] + asks[1] + asks[2], "pilot") == first_rounds
    assert trained_prompts(batch) == sorted([first_rounds[5], first_rounds[9]])
    assert outcomes(scheduler) == {"trained": 24, "too_hard": 80}


@pytest.mark.parametrize("max_rounds", [1, 3, 10])
def test_after_the_last_round_the_step_trains_on_what_survived(max_rounds):
    scheduler = scheduler_of(200, train_prompts=2, pilot_prompts=4, max_pilot_rounds=max_rounds)
    survivor = scheduler_of(200, train_prompts=2, pilot_prompts=4).ask()[0].prompt_id
    asks, batch = play_step(scheduler, first(dict.fromkeys(range(200), 0) | {survivor: 4}))
    assert [count(ask, "pilot") for ask in asks] == [32] * max_rounds + [0]
    assert trained_prompts(batch) == [survivor]
    assert len(batch.rows) == 12


def test_no_prompt_is_piloted_twice_in_one_step():
    for bind in (False, True):
        scheduler = scheduler_of(10, train_prompts=3, pilot_prompts=4, bind_pilots=bind, solved_prompts="next_epoch")
        for t in range(12):
            asks, _ = play_step(scheduler, coin(0.15, seed=t))
            piloted = [p for ask in asks for p in prompts_of(ask, "pilot")]
            assert len(piloted) == len(set(piloted))
            assert len(asks) <= 4  # 4 + 4 + 2 prompts, then the commits: a used-up pool ends the rounds


def test_one_prompt():
    scheduler = scheduler_of(1, bind_pilots=True)
    for _ in range(3):
        asks, batch = play_step(scheduler, first(4))
        assert [(count(a, "pilot"), count(a, "commit")) for a in asks] == [(8, 0), (0, 4)]
        assert len(batch.rows) == 12
    assert scheduler.stop_reason is None


# --- survivors that wait ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("step_size", [1, 2])
def test_a_survivor_older_than_the_bound_is_never_used(bound, step_size):
    """One prompt is trained on per step, ten survive the first: after `bound` steps the rest has aged out."""
    scheduler = scheduler_of(
        500, train_prompts=1, pilot_prompts=11, pilot_every_step=False, max_survivor_age_steps=bound
    )
    ages = []
    for t in range(0, 12 * step_size, step_size):
        batch = play_step(scheduler, first(4), step=t)[1]
        ages.append({row.age_steps for row in batch.rows if row.source == "pilot"})
        assert {row.age_steps for row in batch.rows if row.source == "commit"} == {0}
    cycle = [{age} for age in range(0, bound + 1, step_size)]
    assert ages == (cycle * 12)[:12]
    used = len(cycle)
    assert scheduler.ledger.by_outcome()["aged_out"] == (11 - used) * 8 * ((12 - 1) // used)


def test_a_survivor_of_exactly_the_bound_is_used_and_one_step_later_dropped():
    for gap, used in ((4, True), (5, False)):
        scheduler = scheduler_of(2, train_prompts=1, pilot_prompts=2, pilot_every_step=False)
        play_step(scheduler, first(4), step=10)
        waiting = scheduler.allocator.waiting()[0].prompt
        asks, batch = play_step(scheduler, first({waiting: 4, 1 - waiting: 0}), step=10 + gap)
        assert trained_prompts(batch) == [waiting]
        assert {row.age_steps for row in batch.rows if row.source == "pilot"} == ({4} if used else {0})
        assert [count(ask, "pilot") for ask in asks] == ([0] if used else [16, 0])
        assert outcomes(scheduler).get("aged_out", 0) == (0 if used else 8)


def test_an_aged_out_survivors_unscored_pilots_stay_unscored_in_the_ledger():
    scheduler = scheduler_of(2, train_prompts=1, pilot_prompts=2, pilot_every_step=False, max_survivor_age_steps=1)
    rewards = [0, 0, 0, 1, 1, 1, math.nan, math.inf]
    play_step(scheduler, lambda request, i, step: rewards[i], step=0)
    assert outcomes(scheduler)["pending"] == 8
    play_step(scheduler, always(0), step=5)
    assert outcomes(scheduler)["aged_out"] == 6
    assert outcomes(scheduler)["unscored"] == 4  # two in each of the first step's groups


SELECTIONS = ("random", "most_recent", "max_variance")


def waiting_play(selection, rates, *, seed=0, steps=2):
    """Two survivors wait from the first step, more come in the second; who is chosen then?"""
    scheduler = scheduler_of(
        40, seed=seed, train_prompts=3, pilot_prompts=6, survivor_selection=selection, max_survivor_age_steps=9
    )
    for _ in range(steps):
        asks, batch = play_step(scheduler, rates)
    return scheduler, asks, batch


def test_most_recent_prefers_the_youngest_pilots():
    for seed in range(10):
        scheduler, asks, batch = waiting_play("most_recent", first(4), seed=seed)
        assert set(trained_prompts(batch)) <= set(prompts_of(asks[0], "pilot"))
        assert {row.age_steps for row in batch.rows} == {0}
        assert sorted(g.birth_step for g in scheduler.allocator.waiting()) == [0, 0, 0, 1, 1, 1]


def test_random_takes_old_and_young_alike():
    ages = Counter()
    for seed in range(150):
        _, _, batch = waiting_play("random", first(4), seed=seed)
        ages.update({row.rollout.prompt_id: row.age_steps for row in batch.rows if row.source == "pilot"}.values())
    # 3 of 9 are drawn per seed, of which 3 are old: 450 draws, a third of them old, standard deviation about 8.7
    assert sum(ages.values()) == 450
    assert 115 < ages[1] < 185


def test_max_variance_prefers_rates_near_one_half():
    successes = {p: (4, 2, 6, 1, 3)[p % 5] for p in range(40)}
    for seed in range(10):
        scheduler, _, batch = waiting_play("max_variance", first(successes), seed=seed)
        taken = [successes[p] for p in trained_prompts(batch)]
        left = [successes[g.prompt] for g in scheduler.allocator.waiting()]
        assert max(abs(k - 4) for k in taken) <= min(abs(k - 4) for k in left)


def test_max_variance_uses_rewards_that_are_not_binary():
    """Same success rate, wider rewards."""
    scheduler = scheduler_of(6, train_prompts=1, pilot_prompts=6, survivor_selection="max_variance")
    _, batch = play_step(
        scheduler, lambda request, i, step: 1.0 + request.prompt_id if i < 4 else -float(request.prompt_id)
    )
    assert trained_prompts(batch) == [5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_max_variance_looks_at_scored_pilots_only(bad):
    """An infinite reward has no variance; it must neither win, nor warn, nor spoil the order of the others."""
    successes = [1, 2, 4, 6, 3, 5]

    def reward_of(request, i, step):
        return bad if i == 7 and request.prompt_id != 2 else float(i < successes[request.prompt_id])

    for seed in range(8):
        scheduler = scheduler_of(6, seed=seed, train_prompts=1, pilot_prompts=6, survivor_selection="max_variance")
        _, batch = play_step(scheduler, reward_of)
        assert trained_prompts(batch) == [2]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_ties_among_survivors_are_broken_at_random(selection):
    """Not by the pool's order, nor by prompt id."""
    chosen = set()
    for seed in range(30):
        scheduler = scheduler_of(4, seed=seed, train_prompts=1, pilot_prompts=4, survivor_selection=selection)
        pilots = scheduler.ask()
        scheduler.tell(answer(pilots, first(4), 0))
        chosen.add([r.prompt_id for r in pilots].index(scheduler.ask()[0].prompt_id))
    assert chosen == {0, 1, 2, 3}


# --- binding ----------------------------------------------------------------------------------------------------------


def test_the_next_steps_pilots_come_with_this_steps_commits():
    scheduler = scheduler_of(100, train_prompts=4, pilot_prompts=4, bind_pilots=True, survivor_selection="most_recent")
    asks, batch = play_step(scheduler, first(4))
    assert [(count(a, "pilot"), count(a, "commit")) for a in asks] == [(32, 0), (32, 16)]
    assert [r.purpose for r in asks[1]] == ["commit"] * 4 + ["pilot"] * 4
    assert not set(prompts_of(asks[0], "pilot")) & set(prompts_of(asks[1], "pilot"))
    assert {row.age_steps for row in batch.rows} == {0}
    assert outcomes(scheduler) == {"trained": 48, "pending": 32}

    bound = set(prompts_of(asks[1], "pilot"))
    for _ in range(3):
        asks, batch = play_step(scheduler, first(4))
        assert [(count(a, "pilot"), count(a, "commit")) for a in asks] == [(32, 16)]  # one generate call
        assert set(trained_prompts(batch)) == bound
        assert {(row.source, row.age_steps) for row in batch.rows} == {("pilot", 1), ("commit", 0)}
        births = {row.rollout.purpose: row.rollout.birth_step for row in batch.rows}
        assert births == {"pilot": scheduler.step - 1, "commit": scheduler.step}
        bound = set(prompts_of(asks[0], "pilot"))


def test_bound_pilots_age_in_the_trainers_steps():
    scheduler = scheduler_of(100, train_prompts=4, pilot_prompts=4, bind_pilots=True)
    play_step(scheduler, first(4), step=0)
    _, batch = play_step(scheduler, first(4), step=3)
    assert {row.age_steps for row in batch.rows if row.source == "pilot"} == {3}


def test_bound_pilots_that_all_fail_are_followed_by_a_round_of_the_step():
    scheduler = scheduler_of(100, train_prompts=4, pilot_prompts=4, bind_pilots=True)

    def reward_of(request, i, step):
        return float(i < 4) if (step, len(asked[step])) != (0, 2) or request.purpose == "commit" else 0.0

    asked = defaultdict(list)
    for step in range(2):
        while requests := scheduler.ask():
            asked[step].append(requests)
            scheduler.tell(answer(requests, reward_of, step))
        batch = scheduler.batch()
    assert [(count(a, "pilot"), count(a, "commit")) for a in asked[1]] == [(32, 0), (32, 16)]
    assert {row.age_steps for row in batch.rows} == {0}
    assert scheduler.ledger.by_outcome()["too_hard"] == 32


def test_without_survivors_there_is_nothing_to_bind_to():
    scheduler = scheduler_of(12, train_prompts=2, pilot_prompts=4, bind_pilots=True, max_pilot_rounds=2)
    asks, _ = play_step(scheduler, always(0))
    assert [count(ask, "pilot") for ask in asks] == [32, 32]
    asks, _ = play_step(scheduler, first(4))  # the next step begins with its own pilots
    assert count(asks[0], "pilot") == 32
    assert count(asks[0], "commit") == 0


def test_a_commit_that_no_pilots_could_be_bound_to_is_followed_by_the_steps_own_pilots():
    """All six prompts are busy when the first commits go out; two are free again in the next step."""
    scheduler = scheduler_of(6, train_prompts=2, pilot_prompts=6, bind_pilots=True)
    asks, batch = play_step(scheduler, first(4))
    assert [(count(a, "pilot"), count(a, "commit")) for a in asks] == [(48, 0), (0, 8)]
    asks, _ = play_step(scheduler, first(4))
    assert [(count(a, "pilot"), count(a, "commit")) for a in asks] == [(16, 0), (0, 8)]
    assert sorted(prompts_of(asks[0], "pilot")) == trained_prompts(batch)


@pytest.mark.parametrize("bind", [False, True])
def test_pilots_only_when_survivors_are_short(bind):
    """Every pilot survives: one round of 12 feeds three steps of 4."""
    scheduler = scheduler_of(
        300, train_prompts=4, pilot_prompts=12, bind_pilots=bind, pilot_every_step=False, max_survivor_age_steps=9
    )
    pilots = [sum(count(a, "pilot") for a in play_step(scheduler, first(4))[0]) for _ in range(7)]
    assert pilots == ([96, 0, 96, 0, 0, 96, 0] if bind else [96, 0, 0, 96, 0, 0, 96])


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pilots", "commits", "cost"), [(32, 96, 24_576), (16, 48, 12_288), (8, 8, 4_096)], ids=["128", "64", "16"]
)
@pytest.mark.parametrize("bind", [False, True])
def test_the_papers_cost_per_step(pilots, commits, cost, bind):
    """b_t 128, b_g 384. A third of the prompts survives their pilots, just enough for a step; the rest is too hard."""
    settings = PilotCommit(
        train_prompts=128, pilot_rollouts=pilots, commit_rollouts=commits, pilot_prompts=384, bind_pilots=bind
    )
    assert settings.prompts_per_round == 384
    scheduler = RolloutScheduler(range(4000), allocation=settings)
    costs = []
    for t in range(4):
        generated = 0
        while requests := scheduler.ask():
            generated += count(requests)
            rollouts = []
            for request in requests:
                good = request.purpose == "commit" or requests.index(request) % 2 == 0
                rollouts += [
                    Rollout(request.prompt_id, float(good and i % 2), num_tokens=1) for i in range(request.num_rollouts)
                ]
            scheduler.tell(rollouts)
        rows = scheduler.batch().rows
        assert len(rows) == 128 * (pilots + commits)
        costs.append(generated)
        assert scheduler.step == t
    assert costs == [cost + bind * 384 * pilots] + [cost] * 3
    assert scheduler.ledger.totals()["rollouts_generated"] == sum(costs)


# --- running out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", [False, True])
def test_all_solved_ends_with_a_message(bind):
    scheduler = scheduler_of(10, bind_pilots=bind, max_pilot_rounds=2)
    steps = 0
    while scheduler.stop_reason is None:
        _, batch = play_step(scheduler, always(1))
        assert batch.rows == ()
        steps += 1
        assert steps <= 3
    assert "all 10 prompts have been removed" in scheduler.stop_reason
    assert "solved_prompts='next_epoch'" in scheduler.stop_reason
    assert outcomes(scheduler) == {"solved": 80}
    assert play_step(scheduler, always(1))[0] == []  # a further step asks for nothing, and does not hang
    scheduler.state_dict()


def test_the_last_prompt_that_is_not_solved_keeps_the_run_going():
    scheduler = scheduler_of(3, train_prompts=1, pilot_prompts=3)
    _, batch = play_step(scheduler, first({0: 8, 1: 4, 2: 8}))
    assert scheduler.pool.num_live == 1
    assert scheduler.stop_reason is None
    for successes in (2, 6):
        _, batch = play_step(scheduler, first(successes))
        assert trained_prompts(batch) == [1]
    play_step(scheduler, first(8))
    assert "all 3 prompts" in scheduler.stop_reason


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 14),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.05, 0.4, 0.8, 1.0]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.fixed_dictionaries(
        {
            "train_prompts": st.integers(1, 4),
            "pilot_rollouts": st.integers(1, 5),
            "commit_rollouts": st.integers(1, 3),
            "pilot_prompts": st.one_of(st.none(), st.integers(1, 6)),
            "p_lower": st.sampled_from([0.0, 0.125, 0.5]),
            "p_upper": st.sampled_from([0.5, 0.75, 1.0]),
            "easy_prompts": st.sampled_from(["next_epoch", "remove"]),
            "solved_prompts": st.sampled_from(["next_epoch", "remove"]),
            "max_survivor_age_steps": st.integers(1, 3),
            "bind_pilots": st.booleans(),
            "pilot_every_step": st.booleans(),
            "survivor_selection": st.sampled_from(SELECTIONS),
            "max_pilot_rounds": st.integers(1, 4),
        }
    ),
)
def test_any_play_is_bounded_and_keeps_every_promise(num_prompts, seed, rate, unscored_share, options):
    scheduler = RolloutScheduler(range(num_prompts), allocation=PilotCommit(**options), seed=seed)
    generator = np.random.default_rng(seed)
    removed: set[int] = set()  # by our own triage
    told = 0
    rates = generator.choice([rate, 0.5], size=num_prompts)
    for _ in range(8):
        rounds, piloted = 0, Counter()
        while requests := scheduler.ask():
            rounds += 1
            assert rounds < options["max_pilot_rounds"] + 2  # the empty ask is the last one
            assert not removed & {r.prompt_id for r in requests}
            assert len({r.prompt_id for r in requests}) == len(requests)
            piloted.update(prompts_of(requests, "pilot"))
            assert {(r.purpose, r.num_rollouts) for r in requests} <= {
                ("pilot", options["pilot_rollouts"]),
                ("commit", options["commit_rollouts"]),
            }
            assert len(prompts_of(requests, "commit")) <= options["train_prompts"]
            rollouts = []
            for r in requests:
                rewards = (generator.random(r.num_rollouts) < rates[r.prompt_id]).astype(float)
                rewards[generator.random(r.num_rollouts) < unscored_share] = generator.choice([math.nan, math.inf])
                rollouts += [Rollout(r.prompt_id, float(x), num_tokens=1) for x in rewards]
                scored = rewards[np.isfinite(rewards)]
                if r.purpose == "pilot" and len(scored):
                    if scored.mean() == 1.0:
                        removed |= {r.prompt_id} if options["solved_prompts"] == "remove" else set()
                    elif scored.mean() > options["p_upper"]:
                        removed |= {r.prompt_id} if options["easy_prompts"] == "remove" else set()
            scheduler.tell(rollouts)
            told += len(rollouts)
            assert scheduler.ledger.totals()["rollouts_generated"] == told
        batch = scheduler.batch()
        assert all(number == 1 for number in piloted.values())
        assert scheduler.pool.num_live == num_prompts - len(removed)
        for row in batch.rows:
            assert math.isfinite(row.advantage)
            assert 0 <= row.age_steps <= (options["max_survivor_age_steps"] if row.source == "pilot" else 0)
        waiting = scheduler.allocator.waiting()
        assert scheduler.ledger.by_outcome()["pending"] == sum(len(g.rollouts) for g in waiting)
        assert len({g.prompt for g in waiting}) == len(waiting)
        if scheduler.stop_reason is not None:
            assert removed == set(range(num_prompts))
            break
