"""Time of one replay step: Rollwise's priority index against other ways to hold and draw priorities.

    python benchmarks/replay_buffer.py [--sizes 1000 10000 100000 1000000] [--quick] [--json PATH]

One step inserts 512 rollouts, draws k different ones by priority x exp(-age / tau), gives those new priorities, and
drops what is older than the age bound; k is 64 of 1,000 rollouts and 256 of more. Every design gets the same
priorities, runs in this process, and is filled first. Where a design cannot do a part of that, it does what it can,
which is less work: the table says what is missing.

Only priorities are timed, not what is stored with them, but for `rollwise_buffer`: the whole `ReplayBuffer` as the
scheduler uses it, with rollout objects. Figures are medians of up to 599 steps; designs that take long for a step
are timed for fewer, which is printed below the table.

The peers are optional; what is not installed is named, with how to get it. torchrl's extension loads only under the
torch that it was built for.
"""

import argparse
import bisect
import gc
import itertools
import json
import math
import os
import random
import statistics
import time
from collections import deque
from importlib import metadata
from pathlib import Path

import numpy as np

from rollwise import Replay, ReplayBuffer, Rollout
from rollwise.replay.priority_index import PriorityIndex

ROLLOUTS_PER_STEP = 512
ALPHA = 0.6
INSTALL = {"cpprb": "cpprb==11.0.0", "sumtree": "sumtree==0.3.0", "torchrl": "torchrl==0.14.1 torch==2.14.1"}
FLOOR = 1e-6  # of a published base priority


class Design:
    """A buffer of the last `num_steps` steps' rollouts. Slots are a ring, so that the oldest are overwritten."""

    package: str | None = None
    lacks = ""  # what a step of this design does not do

    def __init__(self, num_steps, num_draws):
        self.num_draws = num_draws
        self.max_age = num_steps - 1
        self.tau = max(2.0, num_steps / 3)
        self.num_slots = num_steps * ROLLOUTS_PER_STEP
        self.births = np.full(self.num_slots, -(10**9))
        self.rng = np.random.default_rng(0)
        self.set_up()

    def new_slots(self, step):
        slots = np.arange(step * ROLLOUTS_PER_STEP, (step + 1) * ROLLOUTS_PER_STEP) % self.num_slots
        self.births[slots] = step
        return slots

    def prepare(self, step, bases):
        """Outside the time taken."""

    def evict(self, step):
        """Rings overwrite the oldest at the next insertion."""


class Rollwise(Design):
    def set_up(self):
        # one step more than is held: a step evicts after it inserts
        self.num_slots += ROLLOUTS_PER_STEP
        self.births = np.empty(self.num_slots)
        self.index = PriorityIndex(self.num_slots)
        self.slots_by_step = deque()

    def insert(self, step, bases):
        slots = self.new_slots(step)
        self.index.set(slots, ALPHA * (np.log(bases) + step / self.tau))
        self.slots_by_step.append((step, slots))

    def draw(self, step):
        return self.index.draw(self.num_draws, self.rng)

    def update(self, step, drawn, bases):
        self.index.set(drawn, ALPHA * (np.log(bases) + self.births[drawn] / self.tau))

    def evict(self, step):
        while self.slots_by_step[0][0] <= step - self.max_age:  # over-aged at the next step
            self.index.remove(self.slots_by_step.popleft()[1])


class RollwiseBuffer(Design):
    def set_up(self):
        settings = Replay(
            alpha=ALPHA, max_age_steps=self.max_age, decay_tau_steps=self.tau, capacity_rollouts=2 * self.num_slots
        )
        self.buffer = ReplayBuffer(settings)

    def prepare(self, step, bases):
        self.rollouts = [
            Rollout(i, 1.0, birth_step=step, advantage=base, nbytes=4096) for i, base in enumerate(bases.tolist())
        ]

    def insert(self, step, bases):
        self.buffer.insert(self.rollouts)

    def draw(self, step):
        return self.buffer.draw(self.num_draws, step, self.rng)

    def update(self, step, drawn, bases):
        self.buffer.set_priorities(drawn, bases)


class Naive(Design):
    def set_up(self):
        self.bases = np.zeros(self.num_slots)

    def insert(self, step, bases):
        self.bases[self.new_slots(step)] = bases

    def draw(self, step):
        ages = step - self.births
        weights = np.where(ages <= self.max_age, (self.bases * np.exp(-ages / self.tau)) ** ALPHA, 0)
        return self.rng.choice(self.num_slots, self.num_draws, replace=False, p=weights / weights.sum(), shuffle=False)

    def update(self, step, drawn, bases):
        self.bases[drawn] = bases


class TorchrlPrioritized(Design):
    package = "torchrl"
    lacks = "different draws, decay, age bound"

    def set_up(self):
        import torch
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self.torch = torch
        self.sampler = PrioritizedSampler(self.num_slots, alpha=ALPHA, beta=0.0)
        self.storage = _FullStorage(self.num_slots)

    def insert(self, step, bases):
        self.update(step, self.torch.from_numpy(self.new_slots(step)), bases)

    def draw(self, step):
        return self.sampler.sample(self.storage, self.num_draws)[0]

    def update(self, step, drawn, bases):
        self.sampler.update_priority(drawn, self.torch.from_numpy(bases.astype(np.float32)))


class _FullStorage:
    """All that PrioritizedSampler asks of a storage."""

    ndim = 1
    device = None

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


class TorchrlStaleness(Design):
    package = "torchrl"
    lacks = "priorities, update (weights are 1 / (age + 1))"

    def set_up(self):
        import torch
        from tensordict import TensorDict
        from torchrl._utils import logger
        from torchrl.data import LazyTensorStorage
        from torchrl.data.replay_buffers.samplers import StalenessAwareSampler

        logger.setLevel("WARNING")
        torch.set_num_threads(1)  # with more, threads that wait for a busy core make this tens of times slower
        self.torch, self.tensordict = torch, TensorDict
        self.sampler = StalenessAwareSampler(max_staleness=self.max_age)
        self.storage = LazyTensorStorage(self.num_slots)

    def insert(self, step, bases):
        versions = self.torch.full((ROLLOUTS_PER_STEP,), step)
        slots = self.torch.from_numpy(self.new_slots(step))
        self.storage.set(slots, self.tensordict({"policy_version": versions}, [ROLLOUTS_PER_STEP]))

    def draw(self, step):
        self.sampler.consumer_version = step
        return self.sampler.sample(self.storage, self.num_draws)[0]

    def update(self, step, drawn, bases):
        """Nothing."""


class Cpprb(Design):
    package = "cpprb"
    lacks = "different draws, decay, age bound"

    def set_up(self):
        from cpprb import PrioritizedReplayBuffer

        fields = {"birth": {"dtype": np.int64}}
        self.buffer = PrioritizedReplayBuffer(self.num_slots, fields, alpha=ALPHA, eps=1e-12)
        self.all_slots = np.arange(self.num_slots)
        self.bases = np.zeros(self.num_slots)

    def insert(self, step, bases):
        slots = self.new_slots(step)
        self.buffer.add(birth=self.births[slots], priorities=bases)

    def draw(self, step):
        return self.buffer.sample(self.num_draws, beta=0.0)["indexes"]

    def update(self, step, drawn, bases):
        self.buffer.update_priorities(drawn, bases)


class CpprbRefreshed(Cpprb):
    lacks = "different draws"

    def insert(self, step, bases):
        super().insert(step, bases)
        self.bases[(self.births == step).nonzero()[0]] = bases

    def draw(self, step):
        self.buffer.update_priorities(self.all_slots, self.bases * np.exp((self.births - step) / self.tau))
        return super().draw(step)

    def update(self, step, drawn, bases):
        self.bases[drawn] = bases  # the next refresh takes them


class SumtreeBare(Design):
    package = "sumtree"
    lacks = "different draws, decay, age bound"

    def set_up(self):
        from sumtree import SumTree

        self.tree = SumTree(self.num_slots)
        self.tree.seed(0)

    def insert(self, step, bases):
        self.tree.update_batched(self.new_slots(step), bases**ALPHA)

    def draw(self, step):
        return self.tree.sample(self.num_draws)[0]

    def update(self, step, drawn, bases):
        self.tree.update_batched(drawn, bases**ALPHA)


class Sumtree(SumtreeBare):
    """Also what a caller can do with it: repetitions dropped in the order drawn, and weight 0 for the over-aged."""

    lacks = "decay"

    def set_up(self):
        self.num_slots += ROLLOUTS_PER_STEP
        self.births = np.empty(self.num_slots)
        super().set_up()
        self.slots_by_step = deque()

    def insert(self, step, bases):
        super().insert(step, bases)
        self.slots_by_step.append((step, np.arange(step * ROLLOUTS_PER_STEP, (step + 1) * ROLLOUTS_PER_STEP)))

    def draw(self, step):
        drawn = {}
        while len(drawn) < self.num_draws:
            missing = self.num_draws - len(drawn)
            drawn |= dict.fromkeys(self.tree.sample(missing + missing // 16 + 4)[0])
        return list(drawn)[: self.num_draws]

    def evict(self, step):
        while self.slots_by_step[0][0] <= step - self.max_age:
            slots = self.slots_by_step.popleft()[1] % self.num_slots
            self.tree.update_batched(slots, np.zeros(len(slots)))


class FreshperStyle(Design):
    """Every decayed priority computed anew and written to a sum tree at every step, in Python.

    As the code published with arXiv 2604.16918 does, but kinder: one tree where it has two, no list of what is
    valid, and one pass over all weights for the stratified draw where it makes one per draw.
    """

    lacks = "different draws"

    def set_up(self):
        self.first_leaf = 1 << (self.num_slots - 1).bit_length()
        self.tree = [0.0] * (2 * self.first_leaf)
        self.bases = [0.0] * self.num_slots
        self.random = random.Random(0)

    def insert(self, step, bases):
        for slot, base in zip(self.new_slots(step).tolist(), bases.tolist(), strict=True):
            self.bases[slot] = base

    def write(self, slot, priority):
        tree, node = self.tree, slot + self.first_leaf
        tree[node] = priority
        while node > 1:
            node >>= 1
            tree[node] = tree[2 * node] + tree[2 * node + 1]

    def draw(self, step):
        births = self.births.tolist()
        for slot in range(self.num_slots):
            freshness = math.exp(-(step - births[slot]) / self.tau)
            self.write(slot, max(self.bases[slot] * freshness, FLOOR) ** ALPHA)
        leaves = self.tree[self.first_leaf : self.first_leaf + self.num_slots]
        cumulative = list(itertools.accumulate(leaves))
        stride = cumulative[-1] / self.num_draws
        masses = [(i + self.random.random()) * stride for i in range(self.num_draws)]
        return [min(bisect.bisect(cumulative, mass), self.num_slots - 1) for mass in masses]

    def update(self, step, drawn, bases):
        for slot, base in zip(drawn, bases.tolist(), strict=True):
            self.bases[slot] = base
            self.write(slot, base**ALPHA)


DESIGNS = {
    "rollwise": Rollwise,
    "rollwise_buffer": RollwiseBuffer,
    "naive": Naive,
    "torchrl_prioritized": TorchrlPrioritized,
    "torchrl_staleness": TorchrlStaleness,
    "cpprb": Cpprb,
    "cpprb_refreshed": CpprbRefreshed,
    "sumtree": Sumtree,
    "sumtree_bare": SumtreeBare,
    "freshper_style": FreshperStyle,
}


def time_design(design_class, num_steps, num_draws, *, seconds, max_steps):
    """Microseconds of each timed step, and how many rollouts are held."""
    design = design_class(num_steps, num_draws)
    rng = np.random.default_rng(1)
    for step in range(num_steps):
        bases = rng.lognormal(size=ROLLOUTS_PER_STEP)
        design.prepare(step, bases)
        design.insert(step, bases)
        design.evict(step)
    gc.collect()
    times, started = [], time.perf_counter()
    for step in range(num_steps, num_steps + max_steps):
        bases, new_bases = rng.lognormal(size=ROLLOUTS_PER_STEP), rng.lognormal(size=num_draws)
        design.prepare(step, bases)
        start = time.perf_counter()
        design.insert(step, bases)
        drawn = design.draw(step)
        design.update(step, drawn, new_bases)
        design.evict(step)
        times.append(1e6 * (time.perf_counter() - start))
        if len(drawn) != num_draws:
            raise RuntimeError(f"{design_class.__name__} drew {len(drawn)} where {num_draws} were wanted")
        if len(times) >= 3 and time.perf_counter() - started > seconds:
            break
    return times if len(times) < 4 else times[1:]  # the first step warms up


def why_missing(design_class):
    """How to get what a design needs; None if it can run."""
    try:
        design_class(2, 1)
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="default: 10^3 to 10^6 (--quick: 10^5)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = options.sizes or [10**3, 10**4, 10**5, *([] if options.quick else [10**6])]
    budget = {"seconds": 0.3, "max_steps": 60} if options.quick else {"seconds": 4.0, "max_steps": 600}

    missing = {name: reason for name, cls in DESIGNS.items() if (reason := why_missing(cls))}
    results, counts = [], []
    for size in sizes:
        num_draws = 64 if size < 5000 else 256
        num_steps = max(2, round(size / ROLLOUTS_PER_STEP))
        medians, steps = {}, {}
        for name, design_class in DESIGNS.items():
            if name not in missing:
                print(f"\r{size:>9,} rollouts: {name:24}", end="", flush=True)
                times = time_design(design_class, num_steps, num_draws, **budget)
                medians[name], steps[name] = round(statistics.median(times), 1), len(times)
        results.append({"size": size, "draw": num_draws, "median_us": medians})
        counts.append(steps)
    print("\r" + 50 * " " + "\r", end="")
    show(results, counts, missing)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def show(results, counts, missing):
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"Microseconds per step, medians (times Rollwise's index); {os.cpu_count()} cores{load}\n")
    print(f"{'':20}" + "".join(f"{r['size']:>13,} k {r['draw']:<5}" for r in results) + "  lacks")
    for name, design_class in DESIGNS.items():
        if name in missing:
            continue
        cells = [f"{r['median_us'][name]:>11,.0f} ({_ratio(r['median_us'], name):>5})" for r in results]
        print(f"{name:20}" + " ".join(cells) + f"  {design_class.lacks or '-'}")
    packages = sorted({cls.package for name, cls in DESIGNS.items() if cls.package and name not in missing})
    print("\n" + ", ".join(f"{package} {metadata.version(package)}" for package in ("numpy", *packages)))
    for result, steps in zip(results, counts, strict=True):
        few = {count: [n for n, c in steps.items() if c == count] for count in sorted(set(steps.values()))}
        print(f"steps timed at {result['size']:,}: " + "; ".join(f"{c} of {', '.join(n)}" for c, n in few.items()))
    for name, reason in missing.items():
        print(f"{name} is left out: {reason.rstrip('.')}. To have it: pip install {INSTALL[DESIGNS[name].package]}")


def _ratio(medians, name):
    ratio = medians[name] / medians["rollwise"]
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


if __name__ == "__main__":
    main()
