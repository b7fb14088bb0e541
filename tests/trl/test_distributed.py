"""Promise 6: two processes with uneven survivors train without hanging and end with equal parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def launch(tmp_path, scenario, num_processes=2):
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command += [str(HERE / "distributed_worker.py"), scenario, str(tmp_path)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.mark.slow
def test_three_processes(tmp_path):
    results = launch(tmp_path, "all", num_processes=3)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert max(error for result in results for error in result["errors"]) < 1e-5
    assert sum(result["owned"] for result in results) == results[0]["stored"] > 0
    assert len({tuple(result["packed_rows"]) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["all", "replay", "none on one process"])
def test_processes_end_equal_with_the_reference_gradient(tmp_path, scenario):
    first, second = launch(tmp_path, scenario)
    assert first["steps"] == second["steps"] == 5
    assert first["weights"] == second["weights"]
    assert first["totals"] == second["totals"]
    assert first["packed_rows"] == second["packed_rows"]
    for result in (first, second):
        assert result["payloads"] == result["owned"]  # each process holds its own rows and no others
    assert first["owned"] + second["owned"] == first["stored"] > 0
    if scenario == "none on one process":
        assert second["owned"] == 0
        assert first["travelled"] > 0  # half of the rows had to travel
    else:
        assert max(first["errors"] + second["errors"]) < 1e-5
        assert len(first["errors"]) == 5
    if scenario == "all":
        assert first["purposes"]["padding"] > 0  # an odd number of pilots was levelled, and counted
