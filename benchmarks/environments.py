"""What the environments cost: a batch of episodes, stepped together, without any model.

    python benchmarks/environments.py
    python benchmarks/environments.py --episodes 64 --turns 20 --json results.json

Every episode has a level of its own and random valid moves that keep it going until its last turn. `first` is the time
of a batch of levels that have never been played, `again` the best of some repeats with the same levels; both by the
clock and, for busy machines, of the processor.
"""

import argparse
import importlib.metadata as metadata
import json
import os
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollwise.tasks import frozen_lake, sokoban
from rollwise.tasks.batch import EnvironmentBatch
from rollwise.tasks.levels import make_environment

MOVES = ("<action>left</action>", "<action>down</action>", "<action>right</action>", "<action>up</action>")

CASES = {
    "FrozenLake 4x4": ("frozen_lake", {}, "4x4"),
    "FrozenLake 4x4, slippery": ("frozen_lake", {"slippery": True}, "4x4"),
    "FrozenLake 4x4, pictures": ("frozen_lake", {"picture": True}, "4x4"),
    "CliffWalking 4x12": ("cliff_walking", {}, "4x12"),
    "CliffWalking 4x12, pictures": ("cliff_walking", {"picture": True}, "4x12"),
    "Sokoban 6x6-1": ("sokoban", {}, "6x6-1"),
    "Sokoban 8x8-2": ("sokoban", {}, "8x8-2"),
    "Sokoban 8x8-2, pictures": ("sokoban", {"picture": True}, "8x8-2"),
}


def survivors(environment, level, episodes, turns):
    """Return levels, and for each one moves that do not end it."""
    rng = np.random.default_rng(0)
    specs, moves = [], []
    while len(specs) < episodes:
        spec, answers = environment.draw_spec(level, rng), rng.choice(MOVES, turns).tolist()
        environment.begin(spec, seed=len(specs))
        if not any(environment.take_turn(answer).done for answer in answers[:-1]):
            specs.append(spec)
            moves.append(answers)
    return specs, moves


def play(batch, specs, moves):
    """Play all moves and return the seconds that took, resets included: by the clock, and of the processor."""
    started, processor = time.perf_counter(), time.process_time()
    batch.reset(specs, seeds=range(len(specs)))
    for turn in zip(*moves, strict=True):
        batch.step(turn)
    seconds = time.perf_counter() - started, time.process_time() - processor
    assert sum(map(len, batch.turns)) == len(moves) * len(moves[0])
    return seconds


def measure(name, settings, level, episodes, turns, repeats):
    settings = settings | {"max_turns": turns}
    specs, moves = survivors(make_environment(name, **settings), level, episodes, turns)
    frozen_lake._lake.cache_clear(), sokoban.read_board.cache_clear()
    batch = EnvironmentBatch(name, settings)
    first, *again = (play(batch, specs, moves) for _ in range(repeats))
    batch.close()
    clock, processor = (min(seconds[i] for seconds in again) for i in (0, 1))
    return {
        "turns": episodes * turns,
        "first_ms": round(1e3 * first[0], 2),
        "first_cpu_ms": round(1e3 * first[1], 2),
        "again_ms": round(1e3 * clock, 2),
        "again_cpu_ms": round(1e3 * processor, 2),
        "again_cpu_us_per_turn": round(1e6 * processor / (episodes * turns), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=10, help="of each episode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    console = Console()
    result = {}
    for case, arguments in CASES.items():
        with console.status(case):
            result[case] = measure(*arguments, options.episodes, options.turns, options.repeats)
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    table = Table(title=f"{options.episodes} episodes of {options.turns} turns; {os.cpu_count()} cores{load}")
    table.add_column("", no_wrap=True)
    for heading in ("first, ms", "of CPU", "again, ms", "of CPU", "µs a turn"):
        table.add_column(heading, justify="right")
    for case, row in result.items():
        table.add_row(case, *(f"{value:.1f}" for name, value in row.items() if name != "turns"))
    console.print(table)
    console.print(", ".join(f"{package} {metadata.version(package)}" for package in ("gymnasium", "numpy")))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
