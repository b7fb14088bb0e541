"""Promise 1: off means off. With replay ratio 0 and uniform allocation the run is the stock trainer's."""

import pytest
import tiny
import torch
from trl import GRPOTrainer

VARIANTS = {
    "defaults": {},
    "several updates per batch": {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo"},
    "kl and truncation": {"beta": 0.04, "mask_truncated_completions": True, "from_folder": True},
    "batch scale": {"scale_rewards": "batch", "loss_type": "bnpo"},
}


def run(tmp_path, trainer_class, **settings):
    trainer = tiny.trainer(tmp_path, trainer_class=trainer_class, **({"max_steps": 20} | settings))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, losses


@pytest.mark.parametrize(
    "variant",
    [name if name == "defaults" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_losses_and_parameters_are_bit_identical(tmp_path, variant):
    stock, stock_losses = run(tmp_path / "stock", GRPOTrainer, **VARIANTS[variant])
    ours, our_losses = run(tmp_path / "ours", tiny.RollwiseGRPOTrainer, **VARIANTS[variant])
    assert our_losses == stock_losses
    assert len(our_losses) == 20
    start = dict(tiny.model().named_parameters())
    moved = False
    for name, parameter in stock.model.named_parameters():
        assert torch.equal(parameter, dict(ours.model.named_parameters())[name]), name
        moved |= not torch.equal(parameter, start[name])
    assert moved


def test_the_off_run_still_counts_its_rollouts(tmp_path):
    trainer, _ = run(tmp_path, tiny.RollwiseGRPOTrainer)
    outcomes = trainer.ledger.by_outcome()
    assert sum(outcomes.values()) == 20 * 16
    assert outcomes["trained"] + outcomes["zero_variance"] == 20 * 16
    assert outcomes["zero_variance"] > 0


@pytest.mark.parametrize("loss_type", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_packing_alone_changes_nothing_but_rounding(tmp_path, loss_type):
    """Replay in its warm-up, dividing as GRPO does: the stock step, through our rows, zero-variance rows left out."""
    zero_variance = 0
    for seed in range(3):
        settings = {"loss_type": loss_type, "gradient_accumulation_steps": 2, "max_steps": 1}
        settings |= {"optim": "sgd", "learning_rate": 1.0}
        stock, _ = run(tmp_path / "stock", GRPOTrainer, seed=seed, **settings)
        ours, _ = run(
            tmp_path / "ours",
            tiny.RollwiseGRPOTrainer,
            seed=seed,
            replay_ratio=0.5,
            drop_zero_variance=False,
            **settings,
        )
        zero_variance += ours.ledger.by_outcome()["zero_variance"]
        start, stock_end, our_end = (
            torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            for model in (tiny.model(), stock.model, ours.model)
        )
        assert (our_end - stock_end).norm() < 1e-5 * (stock_end - start).norm()
    assert zero_variance > 0
