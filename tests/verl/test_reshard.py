"""verl's files for another number of processes. Needs neither verl nor Ray."""

import json

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rollwise import StateError
from rollwise.verl.reshard import check_processes, main, reshard, saved_processes

WEIGHTS = {"a": torch.randn(7, 3), "b": torch.randn(2), "odd": torch.randn(5, 4)}
BUFFER = torch.arange(3)


def part_of(whole, rank, processes):
    """One process's part, as FSDP leaves it: rows, the last processes fewer or none."""
    rows = -(-len(whole) // processes)
    local = whole[rank * rows : (rank + 1) * rows].clone()
    mesh = DeviceMesh("cpu", torch.arange(processes), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def write_checkpoint(folder, processes, version=2):
    """As verl's FSDPCheckpointManager writes it."""
    actor = folder / "actor"
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": processes}))
    for rank in range(processes):
        name = f"world_size_{processes}_rank_{rank}.pt"
        weights = {key: part_of(whole, rank, processes) for key, whole in WEIGHTS.items()}
        torch.save(weights | {"buffer": BUFFER}, actor / f"model_{name}")
        state = {
            i: {"step": torch.tensor(5.0), "exp_avg": part_of(whole + 1, rank, processes)}
            for i, whole in enumerate(WEIGHTS.values())
        }
        groups = [{"lr": 0.1, "params": [0, 1, 2]}]
        torch.save({"state": state, "param_groups": groups}, actor / f"optim_{name}")
        torch.save({"lr_scheduler": {"last_epoch": 5}, "rng": {"cpu": rank}}, actor / f"extra_state_{name}")
    return folder


def read(folder, part, processes):
    return [torch.load(folder / "actor" / f"{part}_world_size_{processes}_rank_{r}.pt") for r in range(processes)]


def whole_of(parts):
    return torch.cat([part.to_local() for part in parts])


@pytest.mark.parametrize(("saved", "processes"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 8)])
def test_the_parts_for_another_number_of_processes_are_those_that_it_would_have_written(tmp_path, saved, processes):
    checkpoint = write_checkpoint(tmp_path / "global_step_5", saved)
    expected = write_checkpoint(tmp_path / "expected", processes)
    assert len(reshard(checkpoint, processes)) == 3 * processes
    assert saved_processes(checkpoint / "actor") == sorted([saved, processes])
    for part in ("model", "optim"):
        for made, written in zip(read(checkpoint, part, processes), read(expected, part, processes), strict=True):
            tensors = (made, written) if part == "model" else (_tensors(made), _tensors(written))
            assert made.keys() == written.keys()
            for name, tensor in tensors[1].items():
                mine = tensors[0][name]
                assert type(mine) is type(tensor)
                if isinstance(tensor, DTensor):
                    assert mine._spec == tensor._spec
                    mine, tensor = mine.to_local(), tensor.to_local()
                assert torch.equal(mine, tensor)
    assert read(checkpoint, "optim", processes)[0]["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]
    generators = [extra["rng"]["cpu"] for extra in read(checkpoint, "extra_state", processes)]
    assert generators == [rank % saved for rank in range(processes)]


def _tensors(optimizer):
    return {f"{i}.{name}": value for i, state in optimizer["state"].items() for name, value in state.items()}


def test_whole_weights_are_what_was_saved(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    reshard(checkpoint, 2)
    parts = read(checkpoint, "model", 2)
    for name, whole in WEIGHTS.items():
        assert torch.equal(whole_of([part[name] for part in parts]), whole)


def test_files_that_are_there_are_left_alone(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 2)
    assert reshard(checkpoint, 2) == []


def test_a_checkpoint_without_an_optimizer_stays_one(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    (tmp_path / "actor" / "optim_world_size_1_rank_0.pt").unlink()
    assert len(reshard(checkpoint, 2)) == 4
    assert not list((tmp_path / "actor").glob("optim_*"))


def test_a_run_with_another_number_of_processes_is_told_what_to_do(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 2)
    check_processes(checkpoint, 2)
    with pytest.raises(StateError, match=r"there are 4 training.* for 2; run: .*verl.reshard .* --processes 4"):
        check_processes(checkpoint, 4)
    reshard(checkpoint, 4)
    check_processes(checkpoint, 4)


def test_what_cannot_be_cut_is_refused_with_another_way(tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path, 2, version=1)
    for refused in (lambda: reshard(checkpoint, 4), lambda: check_processes(checkpoint, 4)):
        with pytest.raises(StateError, match=r"verl.model_merger merge .*load_contents=\[\]"):
            refused()
    with pytest.raises(SystemExit, match="rollwise: .*nothing holds no weights"):
        main([str(tmp_path / "nothing"), "--processes", "2"])
    with pytest.raises(SystemExit):
        main([str(checkpoint), "--processes", "0"])
    assert "--processes is 0; it must be at least 1" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_a_part_is_refused_before_anything_looks_whole(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    (tmp_path / "actor" / "model_world_size_3_rank_2.pt").unlink()
    with pytest.raises(StateError, match=r"lacks \['model_world_size_3_rank_2.pt'\]"):
        reshard(checkpoint, 2)
    assert saved_processes(checkpoint / "actor") == [3]
