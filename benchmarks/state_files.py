"""Seconds to save and to load a full replay buffer: Rollwise's state files against other formats.

    python benchmarks/state_files.py [--rollouts 100000] [--tokens 500] [--repeats 3] [--folder DIR] [--json PATH]

The buffer holds rollouts as the TRL adapter stores them: prompt ids, completion ids, mask and log-probs. Rollwise's
figures are `RolloutScheduler.state_dict` and `save_state`, and `load_state` and `load_state_dict`: from a scheduler to
a file that is synced and checksummed, and to a scheduler that draws the same.

The others start from the same rollouts and end with them: arrays of one name are joined, written and synced; read,
and cut into rows that own their memory. They save the same arrays and scalars, and no more: no scheduler, no names put
in place atomically. All files are read back from the page cache. Figures are medians.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollwise import Replay, Rollout, RolloutScheduler
from rollwise.allocation import Uniform
from rollwise.storage import load_state, save_state

GROUP, GROUPS_PER_STEP = 8, 64
SCALARS = ("prompt_id", "reward", "advantage", "group_mean", "group_std", "td_error", "birth_step", "num_tokens")
SCALARS += ("num_loss_tokens", "nbytes", "owner", "num_uses")
MB = 1e6


def make_scheduler(num_rollouts):
    return RolloutScheduler(
        range(-(-num_rollouts // GROUP)),
        allocation=Uniform(train_prompts=GROUPS_PER_STEP, num_rollouts=GROUP),
        replay=Replay(
            ratio=0.5, max_age_steps=None, capacity_rollouts=num_rollouts, capacity_bytes=1 << 50, warmup_steps=1 << 30
        ),
    )


def filled_scheduler(num_rollouts, num_tokens):
    """A scheduler whose buffer is full after as many steps as it takes."""
    rng = np.random.default_rng(0)

    def row():
        return {
            "prompt_ids": rng.integers(0, 150_000, 100, dtype=np.int32),
            "completion_ids": rng.integers(0, 150_000, num_tokens, dtype=np.int32),
            "completion_mask": np.ones(num_tokens, dtype=np.uint8),
            "old_per_token_logps": -rng.standard_exponential(num_tokens, dtype=np.float32),
        }

    scheduler = make_scheduler(num_rollouts)
    while len(scheduler.buffer) < num_rollouts:
        while requests := scheduler.ask():
            scheduler.tell(
                [
                    Rollout(r.prompt_id, float(i % 2), row(), num_tokens=num_tokens, num_loss_tokens=num_tokens)
                    for r in requests
                    for i in range(r.num_rollouts)
                ]
            )
        scheduler.batch()
    return scheduler


def joined(rollouts):
    """Columns of the rollouts: per array of a payload its values one after another, and their lengths."""
    columns = {name: np.array([getattr(rollout, name) for rollout in rollouts]) for name in SCALARS}
    columns["purpose"] = np.array([rollout.purpose for rollout in rollouts]).view(np.uint8)
    for name in rollouts[0].payload:
        arrays = [rollout.payload[name] for rollout in rollouts]
        columns[name] = np.concatenate(arrays)
        columns[f"{name}.lengths"] = np.array([len(array) for array in arrays])
    return columns


def cut(columns):
    names = [name.removesuffix(".lengths") for name in columns if name.endswith(".lengths")]
    ends = {name: np.cumsum(columns[f"{name}.lengths"]).tolist() for name in names}
    rows = [{} for _ in next(iter(ends.values()))]
    for name in names:
        start, values = 0, columns[name]
        for row, end in zip(rows, ends[name], strict=True):
            row[name] = values[start:end].copy()
            start = end
    return rows, {name: columns[name].tolist() for name in SCALARS}


def sync(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Safetensors:
    package = "safetensors"
    file = "state.safetensors"

    def save(self, path, rollouts):
        from safetensors.numpy import save_file

        save_file(joined(rollouts), path)

    def load(self, path):
        from safetensors.numpy import load_file

        return cut(load_file(path))


class Npz:
    package = "numpy"
    file = "state.npz"

    def save(self, path, rollouts):
        np.savez(path, **joined(rollouts))

    def load(self, path):
        with np.load(path) as file:
            return cut(dict(file))


class ParquetZstd:
    package = "pyarrow"
    file = "state.parquet"

    def save(self, path, rollouts):
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = joined(rollouts)
        table = {name: columns[name] for name in SCALARS}
        table["purpose"] = pa.array([rollout.purpose for rollout in rollouts])
        for name in rollouts[0].payload:
            offsets = np.concatenate([[0], np.cumsum(columns[f"{name}.lengths"])])
            table[name] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(columns[name]))
        pq.write_table(pa.table(table), path, compression="zstd")

    def load(self, path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.read_table(path).combine_chunks()
        columns = {}
        for name in table.column_names:
            column = table.column(name).chunk(0)
            if pa.types.is_large_list(column.type):
                columns[name] = column.values.to_numpy()
                columns[f"{name}.lengths"] = np.diff(column.offsets.to_numpy())
            elif name in SCALARS:
                columns[name] = column.to_numpy()
        return cut(columns)


PEERS = {"safetensors": Safetensors(), "npz": Npz(), "Parquet, zstd": ParquetZstd()}


def timed(seconds, name, function, *arguments, **more):
    started = time.perf_counter()
    result = function(*arguments, **more)
    seconds.setdefault(name, []).append(time.perf_counter() - started)
    return result


def rollwise_once(scheduler, folder, seconds):
    state = timed(seconds, "state_dict", scheduler.state_dict)
    path = timed(seconds, "save_state", save_state, folder, state)
    num_rollouts = len(scheduler.buffer)
    resumed = make_scheduler(num_rollouts)
    loaded = timed(seconds, "load_state", load_state, folder)
    timed(seconds, "load_state_dict", resumed.load_state_dict, loaded)
    for kept, again in zip(scheduler.buffer.rollouts, resumed.buffer.rollouts, strict=True):
        assert kept.payload.keys() == again.payload.keys()
        assert all(np.array_equal(array, again.payload[name]) for name, array in kept.payload.items())
    return path


def peer_once(peer, rollouts, folder, seconds):
    path = Path(folder) / peer.file

    def save():
        peer.save(path, rollouts)
        sync(path)

    timed(seconds, "save", save)
    rows, _ = timed(seconds, "load", peer.load, path)
    assert all(np.array_equal(rows[-1][name], array) for name, array in rollouts[-1].payload.items())
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=500, help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are written; default: the system's temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    console = Console()
    missing = [name for name, peer in PEERS.items() if find_spec(peer.package) is None]
    with console.status("filling the buffer"):
        scheduler = filled_scheduler(options.rollouts, options.tokens)
    rollouts = scheduler.buffer.rollouts
    times, nbytes = {"Rollwise": {}}, {}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for _ in range(options.repeats):  # in turns, so that a busy machine is everybody's
            with console.status("Rollwise"):
                path = rollwise_once(scheduler, folder, times["Rollwise"])
                nbytes["Rollwise"] = path.stat().st_size
            for name, peer in PEERS.items():
                if name not in missing:
                    with console.status(name):
                        path = peer_once(peer, rollouts, folder, times.setdefault(name, {}))
                        nbytes[name] = path.stat().st_size
                        path.unlink()
    finally:
        shutil.rmtree(folder)

    seconds = {name: {stage: statistics.median(values) for stage, values in by.items()} for name, by in times.items()}
    own = seconds["Rollwise"]
    own["save"], own["load"] = own["state_dict"] + own["save_state"], own["load_state"] + own["load_state_dict"]
    result = {
        "rollouts": options.rollouts,
        "tokens": options.tokens,
        "payload_mb": round(scheduler.buffer.nbytes / MB, 1),
        "file_mb": {name: round(size / MB, 1) for name, size in nbytes.items()},
        "seconds": {name: {stage: round(value, 3) for stage, value in by.items()} for name, by in seconds.items()},
        "times_rollwise": {
            name: {stage: round(by[stage] / own[stage], 2) for stage in ("save", "load")}
            for name, by in seconds.items()
            if name != "Rollwise"
        },
    }
    show(console, result, missing)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def show(console, result, missing):
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    title = f"{result['rollouts']:,} rollouts, {result['payload_mb']:,.0f} MB; {os.cpu_count()} cores{load}"
    table = Table(title=title)
    table.add_column("")
    for heading in ("save, s", "x Rollwise", "load, s", "x Rollwise", "file, MB"):
        table.add_column(heading, justify="right")
    for name, by in result["seconds"].items():
        ratios = result["times_rollwise"].get(name, {"save": 1.0, "load": 1.0})
        cells = [cell for stage in ("save", "load") for cell in (f"{by[stage]:.2f}", f"{ratios[stage]:.2f}")]
        table.add_row(name, *cells, f"{result['file_mb'][name]:,.0f}")
    console.print(table)
    stages = ("state_dict", "save_state", "load_state", "load_state_dict")
    console.print("Rollwise: " + ", ".join(f"{s} {result['seconds']['Rollwise'][s]:.2f} s" for s in stages))
    packages = sorted({peer.package for name, peer in PEERS.items() if name not in missing} | {"numpy", "pyarrow"})
    console.print(", ".join(f"{package} {metadata.version(package)}" for package in packages))
    for name in missing:
        console.print(f"{name} is left out. To have it: pip install {PEERS[name].package}")


if __name__ == "__main__":
    main()
