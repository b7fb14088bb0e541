"""Simulated runs: both engines alike for every allocation, the paper's costs, waste by hand, and ends."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import PilotCommit, Uniform
from rollwise.allocation import ALLOCATIONS
from rollwise.errors import ConfigError
from rollwise.ledger import OUTCOMES
from rollwise.simulation import SimulatedPolicy, build_allocation, simulate, zero_variance_share
from rollwise.simulation import run as run_module

PILOT_COMMITS = [
    {},
    {"solved_prompts": "remove"},
    {"solved_prompts": "next_epoch", "easy_prompts": "remove", "p_upper": 0.5},
    {"bind_pilots": False, "pilot_every_step": False, "survivor_selection": "most_recent"},
    {"survivor_selection": "max_variance", "max_survivor_age_steps": 1, "pilot_prompts": 40},
    {"max_pilot_rounds": 2, "p_lower": 0.3, "p_upper": 0.6},
]


def both(allocation, rates, **options):
    return [simulate(allocation, rates, engine=engine, **options) for engine in ("scheduler", "counted")]


def same(one, other):
    assert (one.outcomes, one.ended, one.stop_reason) == (other.outcomes, other.ended, other.stop_reason)
    assert (one.epochs, one.live_prompts) == (other.epochs, other.live_prompts)
    for name in ("rollouts", "trained", "groups", "success", "skill"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_counts_and_the_scheduler_make_the_same_run_for_every_allocation(name, seed):
    rates = np.random.default_rng(seed).beta(0.3, 0.4, 150)
    allocation = build_allocation(name, train_prompts=6, group_size=8)
    one, other = both(allocation, rates, seed=seed, steps=40, gain_per_group=0.01)
    same(one, other)
    assert one.trained[-1] > 0


@pytest.mark.parametrize("options", PILOT_COMMITS, ids=repr)
def test_counts_and_the_scheduler_make_the_same_run_for_every_setting_of_pilot_commit(options):
    rates = np.random.default_rng(7).beta(0.3, 0.4, 120)
    allocation = build_allocation("pilot_commit", options, train_prompts=4, group_size=16)
    same(*both(allocation, rates, steps=40, gain_per_group=0.02, patience_prompts=100))


def test_pilots_that_are_left_out_are_told_apart():
    if "downsample_pilots" not in PilotCommit.__dataclass_fields__:
        pytest.skip("this version keeps all pilots")
    rates = np.random.default_rng(7).beta(0.5, 0.5, 120)
    allocation = build_allocation("pilot_commit", {"pilot_rollouts": 8, "downsample_pilots": 4}, group_size=16)
    one, other = both(allocation, rates, steps=5)
    same(one, other)
    assert one.outcomes["downsampled"] > 0


@pytest.mark.parametrize(
    ("pilots", "commits", "cost"), [(32, 96, 24_576), (16, 48, 12_288), (8, 8, 4_096)], ids=["n128", "n64", "n16"]
)
def test_a_step_of_pilot_commit_costs_what_the_paper_says(pilots, commits, cost):
    """b_g * n_pilot + b_t * n_commit with b_t = 128, b_g = 384 (arXiv 2605.26606, Table 1)."""
    allocation = PilotCommit(
        train_prompts=128, pilot_prompts=384, pilot_rollouts=pilots, commit_rollouts=commits, bind_pilots=False
    )
    rates = np.full(4000, 0.5)  # enough survive in one round
    run = simulate(allocation, rates, steps=4, gain_per_group=0.0, engine="counted")
    assert np.diff(run.rollouts).tolist() == [cost] * 4
    bound = simulate(
        PilotCommit(train_prompts=128, pilot_prompts=384, pilot_rollouts=pilots, commit_rollouts=commits),
        rates,
        steps=4,
        gain_per_group=0.0,
        engine="counted",
    )
    first = cost + 384 * pilots  # it also holds the pilots of the second step
    assert np.diff(bound.rollouts).tolist() == [first, cost, cost, cost]


def test_uniform_wastes_what_the_formula_says():
    """p^G + (1 - p)^G of the rollouts, with 4 standard errors of room."""
    rates = np.random.default_rng(1).beta(0.2, 0.3, 2000)
    allocation = Uniform(train_prompts=100, num_rollouts=8)
    run = simulate(allocation, rates, steps=200, gain_per_group=0.0, engine="counted")  # 10 epochs: exact per prompt
    share = run.outcomes["zero_variance"] / run.rollouts_generated
    p = rates**8 + (1 - rates) ** 8
    error = math.sqrt((p * (1 - p)).mean() / (200 * 100))
    assert share == pytest.approx(zero_variance_share(rates, 8), abs=4 * error)
    assert zero_variance_share([0.5, 1.0], 2) == pytest.approx((0.5 + 1.0) / 2)
    assert run.epochs == 10


def test_the_policy_learns_what_its_groups_say():
    """Two prompts of rate 1/2, groups of 2: a step in which k groups are mixed gains k * gain."""
    run = simulate(Uniform(train_prompts=2, num_rollouts=2), [0.5, 0.5], steps=1, gain_per_group=0.25)
    assert run.skill[-1] == pytest.approx(0.25 * run.groups[-1])
    assert run.success[-1] == pytest.approx(1 / (1 + math.exp(-0.25 * run.groups[-1])))
    assert run.trained[-1] == 2 * run.groups[-1]


def test_gain_saturation_and_forgetting_by_hand():
    """Groups of 1/2 and 1/10: S = 1 + 0.6; with 0.4 critical groups a fifth of it counts."""
    policy = SimulatedPolicy([0.5], gain_per_group=0.1, critical_groups=0.4, forgetting=0.25)
    policy.train([0.5, 0.1])
    assert policy.skill == pytest.approx(0.1 * 1.6 / 5)
    policy.train([])
    assert policy.skill == pytest.approx(0.75 * 0.1 * 1.6 / 5)
    assert policy.mean_success() == pytest.approx(1 / (1 + math.exp(-policy.skill)))


def test_rates_move_together_but_for_0_and_1():
    """Two logits up: 0.1 becomes 1 / (1 + 9 e^-2)."""
    policy = SimulatedPolicy([0.0, 0.1, 1.0], gain_per_group=2.0)
    policy.train([0.5])
    assert policy.rates([0, 1, 2]).tolist() == pytest.approx([0, 1 / (1 + 9 * math.exp(-2)), 1])
    assert policy.successes([0, 2], [5, 7]) == [0, 7]


@settings(max_examples=30, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=30),
    name=st.sampled_from(sorted(ALLOCATIONS)),
    train_prompts=st.integers(1, 5),
    group_size=st.integers(3, 9),
    seed=st.integers(0, 3),
)
def test_totals_add_up_and_every_pool_ends_well(rates, name, train_prompts, group_size, seed):
    allocation = build_allocation(name, train_prompts=train_prompts, group_size=group_size)
    one, other = both(allocation, rates, seed=seed, steps=25, gain_per_group=0.1, patience_prompts=60)
    same(one, other)
    assert set(one.outcomes) == set(OUTCOMES)
    assert all(count >= 0 for count in one.outcomes.values())
    assert sum(one.outcomes.values()) == one.rollouts_generated
    assert one.outcomes["trained"] == one.trained[-1]
    assert one.ended in ("steps", "exhausted", "patience")
    assert (one.stop_reason is not None) == (one.ended != "steps")


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize(("rate", "words"), [(1.0, ("all solved", "retired", "removed")), (0.0, ("hopeless",))])
def test_a_pool_that_teaches_nothing_ends_with_the_reason(name, rate, words):
    allocation = build_allocation(name, train_prompts=8, group_size=8)
    for run in both(allocation, np.full(500, rate), budget_rollouts=10**6):
        assert run.ended in ("exhausted", "patience")
        assert any(word in run.stop_reason for word in words)
        assert run.rollouts_generated < 50_000
        assert run.trained[-1] == 0
        assert run.success[-1] == rate


def test_it_stops_at_its_target_or_budget():
    allocation, rates = Uniform(train_prompts=4, num_rollouts=8), np.full(50, 0.4)
    run = simulate(allocation, rates, budget_rollouts=100_000, target=0.6, gain_per_group=0.01)
    assert run.ended == "target"
    assert run.success[-2] < 0.6 <= run.success[-1]
    assert run.rollouts_to(0.6) == run.rollouts_generated
    assert run.rollouts_to(0.99) is None
    assert simulate(allocation, rates, steps=5, target=0.3).steps == 0
    run = simulate(allocation, rates, budget_rollouts=100)
    assert (run.ended, run.rollouts.tolist()) == ("budget", [0, 32, 64, 96, 128])


def test_the_engine_follows_from_the_size(monkeypatch):
    allocation, rates = Uniform(train_prompts=4, num_rollouts=8), np.full(50, 0.4)
    monkeypatch.setattr(run_module, "SCHEDULER_ROLLOUTS", 320)
    assert simulate(allocation, rates, steps=10).engine == "scheduler"
    assert simulate(allocation, rates, steps=11).engine == "counted"
    assert simulate(allocation, rates, budget_rollouts=321).engine == "counted"
    shares = []
    simulate(allocation, rates, steps=4, progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_allocations_are_sized_for_a_group():
    uniform = build_allocation("uniform", train_prompts=7, group_size=12)
    assert (uniform.train_prompts, uniform.num_rollouts) == (7, 12)
    pilot_commit = build_allocation("pilot_commit", {"p_lower": 0.2}, train_prompts=7, group_size=12)
    assert (pilot_commit.pilot_rollouts, pilot_commit.commit_rollouts, pilot_commit.p_lower) == (3, 9, 0.2)
    assert build_allocation("pilot_commit", {"pilot_rollouts": 8}, group_size=16).commit_rollouts == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build_allocation("unifrom"), "'unifrom'; it must be one of uniform, "),
        (lambda: build_allocation("pilot_commit", {"p_uper": 1}), "'p_uper'; did you mean 'p_upper'"),
        (lambda: build_allocation("pilot_commit", {"pilot_rollouts": 16}), "pilot_rollouts is 16 of groups of 16"),
        (lambda: build_allocation("uniform", {"num_rollouts": "x"}), "num_rollouts is 'x'; it must be a whole number"),
        (lambda: simulate(Uniform(), [0.5]), "steps and budget_rollouts are both missing"),
        (lambda: simulate(Uniform(), [0.5], steps=0), "steps is 0; it must be at least 1"),
        (lambda: simulate(Uniform(), [0.5], steps=1, target=1.5), "target is 1.5"),
        (lambda: simulate(Uniform(), [0.5], steps=1, engine="gpu"), "engine is 'gpu'"),
        (lambda: simulate(Uniform(), [1.5], steps=1), "give one success rate in"),
        (lambda: simulate(Uniform(), [0.5], steps=1, gain_per_group=-1.0), "gain_per_group is -1"),
        (lambda: simulate(Uniform(), [0.5], steps=1, critical_groups=0.0), "critical_groups is 0"),
        (lambda: simulate(Uniform(), [0.5], steps=1, forgetting=2.0), "forgetting is 2"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_it_needs_numpy_alone():
    code = (
        "import sys, rollwise.simulation.jobs, rollwise.simulation.spec\n"
        "heavy = ('torch', 'transformers', 'trl', 'pyarrow', 'scipy', 'rich', 'typer', 'yaml')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
