"""Tutorial 4: reading the effective sample size by age, and choosing tau.

    python examples/tutorial_4_ess_and_tau.py

A replayed token is weighted by pi / mu, the ratio of the policy to the one that generated it. The further they are
apart, the more uneven the weights, and the fewer tokens count: ESS = (sum w)^2 / (n sum w^2). It falls about as
exp(-age / tau), so what is measured says which tau fits. This trains with a large age bound, at a small and at a
large learning rate, and reads the log.
"""

import argparse
import math

import numpy as np
from tutorial_tools import logged, make_trainer, table

BINS = {"1": 1.0, "2-3": 2.5, "4-7": 5.5, "8-15": 11.5}  # as in the log, and the middle of each


def fitted_tau(ess: dict[float, float]) -> float:
    """Least squares of -log ESS = age / tau through the origin: the formula of `decay_tau_steps="auto"`, bins alike."""
    return sum(age**2 for age in ess) / max(1e-12, sum(age * -math.log(value) for age, value in ess.items()))


def main(steps: int = 24, learning_rates: tuple[float, ...] = (1e-4, 1e-3)) -> dict[float, dict[str, object]]:
    print(__doc__.partition("\n\n    ")[0])
    results = {}
    for rate in learning_rates:
        trainer = make_trainer(
            f"learning rate {rate:g}",
            max_steps=steps,
            learning_rate=rate,
            replay_ratio=1.0,
            replay_max_age_steps=15,
            replay_warmup_steps=1,
            replay_decay_tau_steps="auto",
            replay_ess_bound=0.0,  # without its warning: this is what it would say
        )
        trainer.train()
        late = slice(steps // 2, None)
        figures = {
            name: {age: float(np.mean(values[late] or values)) for age, values in found.items() if values}
            for name, found in (
                (name, {age: logged(trainer, f"{name}/age_{age}") for age in BINS})
                for name in ("ess_token", "kl", "clip_fraction")
            )
        }
        tau = fitted_tau({BINS[age]: value for age, value in figures["ess_token"].items()})
        automatic = logged(trainer, "decay_tau_steps")
        results[rate] = figures | {"tau": tau, "auto": automatic[-1] if automatic else math.nan}
        print(f"\nLearning rate {rate:g}, mean over the second half of {steps} steps:\n")
        table(
            ["age in steps", "ESS per token", "KL per token", "clipped"],
            [
                (age, ess, f"{figures['kl'][age]:.5f}", figures["clip_fraction"][age])
                for age, ess in figures["ess_token"].items()
            ],
        )
        print(
            f"tau fitted to these bins: {tau:,.0f} steps; decay_tau_steps='auto': {results[rate]['auto']:,.0f} steps."
        )
    print("""
How to read it
- ESS near 1 at every age: nothing is stale yet. A larger age bound costs nothing, and decay would only narrow the draw.
- ESS below about 0.5 at some age: rows of that age hardly count. Lower the age bound to below it, or set tau so that
  exp(-age / tau) is small there. The trainer warns of it (replay_ess_bound).
- tau goes with the learning rate: one that fits another run need not fit yours. 'auto' follows what is measured.
- tau many times the age bound does nothing, and the trainer says so.
Next: tutorial_5_together.py.""")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The effective sample size by age, and tau")
    parser.add_argument("--steps", type=int, default=24)
    main(parser.parse_args().steps)
