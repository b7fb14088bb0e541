"""A checkpoint of verl for another number of training processes.

    python -m rollwise.verl.reshard checkpoints/global_step_40 --processes 2

verl's files of weights and of the optimizer's state hold one process's part each, and want as many processes as have
written them. This cuts the same numbers into other parts, in new files beside the old ones; the run then goes on with
either number. For verl's strategy fsdp2. The parts of all processes must fit into memory at once. Needs torch alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rollwise.errors import RollwiseError, StateError
from rollwise.files import replacing

logger = logging.getLogger(__name__)

_FILE = "{part}_world_size_{processes}_rank_{rank}.pt"
_FIRST = re.compile(r"model_world_size_(\d+)_rank_0\.pt")
_MODELS = ("actor", "critic")


def saved_processes(folder: Path) -> list[int]:
    """Numbers of processes that the files of one model, `<checkpoint>/actor` or `critic`, are there for."""
    return sorted(int(match[1]) for path in folder.glob("model_*") if (match := _FIRST.fullmatch(path.name)))


def check_processes(checkpoint: Path, processes: int) -> None:
    """Refuse a checkpoint whose files are for other numbers of processes, before verl misses one of them.

    Raises:
        StateError: If there are none for `processes`; the message says how to make some.
    """
    for model in _MODELS:
        saved = saved_processes(checkpoint / model)
        if saved and processes not in saved:
            raise StateError(
                f"there are {processes} training processes, and {checkpoint / model} has the parts of weights and "
                f"optimizer for {_or(saved)}; {_remedy(checkpoint, model, processes)}"
            )


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _remedy(checkpoint: Path, model: str, processes: int) -> str:
    if _fsdp_version(checkpoint / model) == 2:
        return f"run: python -m rollwise.verl.reshard {checkpoint} --processes {processes}"
    return (
        "only those that the strategy fsdp2 has written can be cut anew. Merge the weights with `python -m "
        f"verl.model_merger merge --backend fsdp --local_dir {checkpoint / model} --target_dir MERGED`, and go on with "
        "actor_rollout_ref.model.path=MERGED and actor_rollout_ref.actor.checkpoint.load_contents=[]: the scheduler's "
        "state and the data's order are kept, the weights are rounded to bfloat16, and the optimizer begins anew"
    )


def _fsdp_version(folder: Path) -> int | None:
    path = folder / "fsdp_config.json"
    return json.loads(path.read_text()).get("FSDP_version") if path.is_file() else None


def reshard(checkpoint: Path, processes: int) -> list[Path]:
    """Write the files of a checkpoint for another number of training processes.

    Args:
        checkpoint: verl's folder `global_step_<n>`.
        processes: How many there will be.

    Returns:
        The files written; none if they were there.

    Raises:
        StateError: If the checkpoint is none, lacks a part, or is cut in a way that this does not know.
    """
    written: list[Path] = []
    models = [checkpoint / name for name in _MODELS if saved_processes(checkpoint / name)]
    if not models:
        raise StateError(f"{checkpoint} holds no weights saved by verl's FSDP; name a folder global_step_<n>")
    for folder in models:
        saved = saved_processes(folder)
        if processes in saved:
            logger.info("%s has files for %d processes.", folder, processes)
            continue
        if _fsdp_version(folder) != 2:
            raise StateError(f"{folder} is for {_or(saved)}; {_remedy(checkpoint, folder.name, processes)}")
        # The model's come last, by which all are known to be there.
        for part in ("extra_state", "optim", "model"):
            written += _reshard_part(folder, part, saved[0], processes)
    return written


def _reshard_part(folder: Path, part: str, saved: int, processes: int) -> list[Path]:
    old = [folder / _FILE.format(part=part, processes=saved, rank=rank) for rank in range(saved)]
    new = [folder / _FILE.format(part=part, processes=processes, rank=rank) for rank in range(processes)]
    missing = [path.name for path in old if not path.is_file()]
    if len(missing) == saved and part != "model":
        return []  # the run's checkpoint.save_contents left it out
    if missing:
        raise StateError(f"{folder} lacks {missing}; take another checkpoint")
    # Of the optimizer's schedule, the same for all, and of generators, which are each process's own.
    if part == "extra_state":
        for rank, path in enumerate(new):
            with replacing(path) as partial:
                shutil.copyfile(old[rank % saved], partial)
        return new
    trees = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in old]
    for rank, path in reversed(list(enumerate(new))):  # that of rank 0 is the one that is looked for
        with replacing(path) as partial:
            torch.save(_cut(trees, rank, processes), partial)
        logger.info("%s", path)
    return new


def _cut(parts: Sequence[Any], rank: int, processes: int) -> Any:
    """One process's part of what the parts make up, tensor for tensor; what is no sharded tensor is the first's."""
    first = parts[0]
    if isinstance(first, DTensor):
        return _cut_tensor(list(parts), rank, processes)
    if isinstance(first, dict):
        return {key: _cut([part[key] for part in parts], rank, processes) for key in first}
    return first


def _cut_tensor(parts: list[DTensor], rank: int, processes: int) -> DTensor:
    spec = parts[0]._spec
    if spec.mesh.ndim != 1 or not isinstance(spec.placements[0], Shard):
        raise StateError(
            f"a tensor is placed as {spec.placements} on {spec.mesh}, and only those that are sharded over all "
            "processes (actor.fsdp_config.fsdp_size=-1) can be cut anew"
        )
    dim = spec.placements[0].dim
    whole = torch.cat([part._local_tensor for part in parts], dim)
    pieces = whole.chunk(processes, dim)  # as FSDP cuts: the last ones may be smaller, or empty
    local = pieces[rank].clone() if rank < len(pieces) else whole.narrow(dim, 0, 0).clone()
    # Without a backend, as a mesh is that has been read from a file.
    mesh = DeviceMesh(
        spec.mesh.device_type,
        torch.arange(processes),
        mesh_dim_names=spec.mesh.mesh_dim_names,
        _init_backend=False,
        _rank=rank,
    )
    return DTensor(local, DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta), requires_grad=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write files as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m rollwise.verl.reshard", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="verl's folder global_step_<n>")
    parser.add_argument("--processes", type=int, required=True, help="training processes that will go on from it")
    given = parser.parse_args(arguments)
    if given.processes < 1:
        parser.error(f"--processes is {given.processes}; it must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        reshard(given.checkpoint, given.processes)
    except RollwiseError as error:
        raise SystemExit(f"rollwise: {error}") from None


if __name__ == "__main__":
    main()
