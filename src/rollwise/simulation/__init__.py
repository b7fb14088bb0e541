"""What a method would cost and how fast it would learn: the real allocators on a policy without a model.

`rates` says how hard the prompts are, `policy` how the simulated policy answers and learns, `engines` joins it to the
scheduler, `run` plays a run and `compare` puts several methods and seeds side by side. Numpy alone.
"""

from rollwise.simulation.compare import compare
from rollwise.simulation.policy import SimulatedPolicy
from rollwise.simulation.rates import PRESETS, Rates, estimate_rates, parse_bins, zero_variance_share
from rollwise.simulation.run import SimulatedRun, build_allocation, simulate

__all__ = [
    "PRESETS",
    "Rates",
    "SimulatedPolicy",
    "SimulatedRun",
    "build_allocation",
    "compare",
    "estimate_rates",
    "parse_bins",
    "simulate",
    "zero_variance_share",
]
