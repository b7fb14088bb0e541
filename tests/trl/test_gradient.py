"""Promise 2: with replay and Pilot-Commit on, the gradient is the reference's, through the real trainer."""

import pytest
import tiny
from reference import GradientReference

LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
}


def check(tmp_path, settings, **extra):
    reference = GradientReference(epsilon_high=settings.get("epsilon_high", 0.2))
    trainer = tiny.trainer(tmp_path, callbacks=[reference], learning_rate=3e-3, **(settings | extra))
    reference.watch(trainer).train()
    assert len(reference.errors) == trainer.args.max_steps
    assert max(reference.errors) < 1e-5
    return reference


COMBINATIONS = [(loss, accumulation, iterations) for loss in LOSSES for accumulation in (1, 2) for iterations in (1, 2)]
FAST = [("grpo", 2, 2), ("dapo", 2, 2), ("cispo", 2, 2), ("gspo", 2, 1)]


@pytest.mark.parametrize(
    ("loss", "accumulation", "iterations"),
    [c if c in FAST else pytest.param(*c, marks=pytest.mark.slow) for c in COMBINATIONS],
)
def test_replay_and_pilot_commit_together(tmp_path, loss, accumulation, iterations):
    reference = check(
        tmp_path,
        LOSSES[loss],
        allocation="pilot_commit",
        pilot_rollouts=3,
        p_lower=0.1,
        replay_ratio=1.0,
        max_steps=6,
        gradient_accumulation_steps=accumulation,
        num_iterations=iterations,
    )
    assert {"pilot", "commit", "replay"} <= set(reference.sources)
    assert max(reference.ages) >= 2
    if loss in ("grpo", "dr_grpo", "dapo"):
        assert reference.clipped > 0  # the ratio has left the clip range somewhere: the test sees the correction


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
@pytest.mark.parametrize("drop_zero_variance", [pytest.param(True, marks=pytest.mark.slow), False])
def test_replay_alone_with_either_normaliser(tmp_path, loss, drop_zero_variance):
    reference = check(
        tmp_path, LOSSES[loss], replay_ratio=0.5, drop_zero_variance=drop_zero_variance, gradient_accumulation_steps=2
    )
    assert {"uniform", "replay"} == set(reference.sources)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"replay_unit": "group", "replay_priority": "group_std"},
        {"replay_priority": "uniform", "replay_newcomers": "max", "replay_max_uses": 1},
        {"replay_priority": "priorities_for_tests.shortest_first", "replay_decay_tau_steps": 2.0},
        {"replay_priority": "recency", "replay_max_age_steps": None},
        {"replay_composition": "pool", "drop_zero_variance": False},
    ],
    ids=["groups", "used once", "user's", "recency", "pool"],
)
def test_whatever_is_drawn_the_gradient_is_the_references(tmp_path, settings):
    reference = check(
        tmp_path, LOSSES["dapo"], replay_ratio=0.5, max_steps=6, per_device_train_batch_size=32, **settings
    )
    assert {"uniform", "replay"} == set(reference.sources)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
@pytest.mark.parametrize(
    ("settings", "sources"),
    [
        ({"allocation": "belief", "pilot_rollouts": 3}, {"pilot", "commit", "replay"}),
        ({"allocation": "dynamic_sampling", "allocation_kwargs": {"max_rounds": 4}}, {"uniform", "resample", "replay"}),
        ({"allocation": "history_skipping"}, {"uniform", "replay"}),
        (
            {
                "allocation": "successive_elimination",
                "allocation_kwargs": {"round_rollouts": 4, "max_rounds": 3, "min_successes": 1, "min_failures": 1},
            },
            {"uniform", "resample", "replay"},
        ),
        (
            {
                "allocation": "pilot_commit",
                "pilot_rollouts": 5,
                "p_lower": 0.1,
                "allocation_kwargs": {"downsample_pilots": 3},
            },
            {"pilot", "commit", "replay"},
        ),
    ],
    ids=["belief", "dynamic_sampling", "history_skipping", "successive_elimination", "downsampled pilots"],
)
def test_every_allocation_with_replay(tmp_path, loss, settings, sources):
    reference = check(tmp_path, LOSSES[loss], replay_ratio=0.5, max_steps=6, per_device_train_batch_size=32, **settings)
    assert set(reference.sources) == sources


CORRECTIONS = {
    "truncated": {"replay_correction": "truncated", "replay_truncation_cap": 1.01},
    "sequence_mask": {"replay_correction": "sequence_mask", "replay_mask_bound": 1.01},
    "none": {"replay_correction": "none"},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_other_corrections_of_replayed_rows(tmp_path, loss, correction):
    reference = check(
        tmp_path,
        LOSSES[loss],
        replay_ratio=1.0,
        max_steps=4,
        num_iterations=2 if loss == "dapo" else 1,
        gradient_accumulation_steps=2,
        **CORRECTIONS[correction],
    )
    assert {"uniform", "replay"} == set(reference.sources)
    assert reference.cut > 0 or correction == "none"  # something was truncated or masked: the test sees it


def test_importance_weights_of_per(tmp_path):
    settings = {"replay_per_beta": 0.4, "replay_per_beta_steps": 6, "replay_alpha": 2.0}
    reference = check(
        tmp_path, LOSSES["grpo"], replay_ratio=1.0, max_steps=6, per_device_train_batch_size=32, **settings
    )
    assert min(reference.weights) < 0.9
    assert max(reference.weights) == 1.0


@pytest.mark.parametrize("settings", [{}, {"allocation": "pilot_commit", "pilot_rollouts": 3, "p_lower": 0.1}])
@pytest.mark.parametrize("drop_zero_variance", [True, False])
def test_replay_only_updates(tmp_path, settings, drop_zero_variance):
    reference = check(
        tmp_path,
        LOSSES["dapo"],
        replay_ratio=0.0,
        replay_updates_per_fresh=2,
        replay_warmup_steps=0,
        max_steps=9,
        per_device_train_batch_size=32,
        drop_zero_variance=drop_zero_variance,
        max_survivor_age_steps=9,
        **settings,
    )
    generated = {record["step"] for record in reference.trainer.ledger.records() if record["kind"] == "generated"}
    replayed = {record["step"] for record in reference.trainer.ledger.records() if record["kind"] == "replayed"}
    assert generated == {0, 3, 6}
    assert replayed == {1, 2, 4, 5, 7, 8}
    assert max(reference.ages) > 3


def test_rows_of_several_optimizer_steps_share_the_batch_normaliser(tmp_path):
    """Two optimizer steps per generate call: each sees its part of the rows, both together the batch's loss."""
    trainer = tiny.trainer(
        tmp_path, replay_ratio=0.5, steps_per_generation=2, per_device_train_batch_size=8, loss_type="grpo", max_steps=4
    )
    batches, packed = [], []
    batch, pack = trainer.scheduler.batch, trainer._pack
    trainer.scheduler.batch = lambda: batches.append(batch()) or batches[-1]
    trainer._pack = lambda b: packed.append(pack(b)) or packed[-1]
    trainer.train()
    for one, output in zip(batches, packed, strict=True):
        rows = len(output["advantages"])
        assert rows % 2 == 0
        expected = sum(row.advantage for row in one.rows) / one.normalizer_rows
        assert output["advantages"].sum().item() / rows == pytest.approx(expected, abs=1e-6)
