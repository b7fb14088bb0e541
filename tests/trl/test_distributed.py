"""Promise 6: processes with uneven survivors train without hanging and end with equal parameters."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import trl
from packaging.version import Version

HERE = Path(__file__).parent
TIME_LIMIT = 240  # seconds
HAS_IMAGES = (
    importlib.util.find_spec("PIL") is not None
    and Version(trl.__version__) >= Version("1.11")
    and Version(transformers.__version__) >= Version("5.6")
)


def launch(tmp_path, scenario, family="", num_processes=2, worker="distributed_worker.py"):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command += [str(HERE / worker), scenario, str(tmp_path), family]
    log = tmp_path / "log.txt"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as launcher:
        try:
            launcher.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # unlike a kill, it takes the workers along, after 30 s at most
            raise
    assert launcher.returncode == 0, log.read_text()[-3000:]
    return [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.mark.slow
def test_three_processes(tmp_path):
    results = launch(tmp_path, "all", num_processes=3)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert max(error for result in results for error in result["errors"]) < 1e-5
    assert sum(result["owned"] for result in results) == results[0]["stored"] > 0
    assert len({tuple(result["packed_rows"]) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["all", "replay", "measured ages", "none on one process"])
def test_processes_end_equal_with_the_reference_gradient(tmp_path, scenario):
    first, second = launch(tmp_path, scenario)
    assert first["steps"] == second["steps"] == 5
    assert first["weights"] == second["weights"]
    assert first["totals"] == second["totals"]
    assert first["packed_rows"] == second["packed_rows"]
    assert first["decisions"] == second["decisions"]
    assert first["generator"] == second["generator"]
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


DECISIONS = ("weights", "decisions", "generator", "totals", "purposes", "packed_rows", "stored", "steps")


def check_images(results, num_steps):
    for name in DECISIONS:
        assert all(result[name] == results[0][name] for result in results), name
    for result in results:
        assert max(result["errors"]) < 1e-5
        assert result["payloads"] == result["owned"]
    assert sum(result["owned"] for result in results) == results[0]["stored"] > 0
    assert results[0]["steps"] == num_steps
    assert sum(result["travelled"] for result in results) > 0
    sources = {row["source"] for rows in results[0]["decisions"] for row in rows}
    assert "replay" in sources
    shapes = {tuple(shape) for result in results for shape in result["image_shapes"]}
    assert len(shapes) > 1  # images of several sizes or numbers
    return sources


needs_environments = pytest.mark.skipif(
    not HAS_IMAGES or importlib.util.find_spec("gymnasium") is None, reason="episodes need gymnasium, and pictures"
)


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["episodes", "episodes, pictures"])
def test_episodes_of_several_processes_wait_for_each_other(tmp_path, scenario):
    results = launch(tmp_path, scenario)
    for name in DECISIONS:
        assert results[0][name] == results[1][name], name
    for result in results:
        assert len(result["errors"]) >= 3
        assert max(result["errors"]) < 1e-5
    assert sum(result["owned"] for result in results) == results[0]["stored"] > 0
    assert "replay" in {row["source"] for rows in results[0]["decisions"] for row in rows}


needs_images = pytest.mark.skipif(
    not HAS_IMAGES, reason="images need Pillow, TRL 1.11, and processors without torchvision transformers 5"
)


@needs_images
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_images_travel_with_their_rows(tmp_path, num_processes):
    results = launch(tmp_path, "images", "qwen2_vl", num_processes)
    assert check_images(results, num_steps=5) == {"uniform", "replay"}
    assert len(results[0]["errors"]) == 5
    assert sum(result["sent_images"] for result in results) > 0


@needs_images
@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_processes"), [("qwen2_vl", 2), ("qwen2_vl", 3), ("llava_next", 2)])
def test_images_with_replay_and_pilot_commit(tmp_path, family, num_processes):
    results = launch(tmp_path, "images, all", family, num_processes)
    assert check_images(results, num_steps=5) == {"pilot", "commit", "replay"}
    assert len(results[0]["errors"]) == 5
    assert sum(result["sent_images"] for result in results) > 0


@needs_images
@pytest.mark.slow
def test_a_process_may_have_text_alone_while_another_has_images(tmp_path):
    """The vision tower then has no gradient on one of them, which the other must not wait for."""
    results = launch(tmp_path, "images and text", "qwen2_vl")
    check_images(results, num_steps=12)
    by_step = list(zip(*(result["packed_images"] for result in results), strict=True))
    assert any(min(images) == 0 < max(images) for images in by_step)
    assert any(min(images) > 0 for images in by_step)
