"""Promise 6: processes with uneven survivors train without hanging and end with equal parameters."""

import importlib.util
from functools import cache

import pytest
import releases
from processes import Launch

HAS_IMAGES = releases.HAS_IMAGES and importlib.util.find_spec("PIL") is not None
HAS_ENVIRONMENTS = HAS_IMAGES and importlib.util.find_spec("gymnasium") is not None
EVERYWHERE = ["all", "replay", "measured ages", "none on one process"]
EPISODES = ["episodes", "episodes, pictures"]
#: Processes -> what they run, one after the other.
RUNS = {
    2: [[scenario] for scenario in EVERYWHERE + EPISODES * HAS_ENVIRONMENTS],
    3: [["all"]],
}
if HAS_IMAGES:
    RUNS[2] += [["images", "qwen2_vl"], ["images and text", "qwen2_vl"]]
    RUNS[2] += [["images, all", "qwen2_vl"], ["images, all", "llava_next"]]
    RUNS[3] += [["images", "qwen2_vl"], ["images, all", "qwen2_vl"]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Give what each process found in a run, by the number of processes and the run's arguments."""
    launch = cache(
        lambda num_processes: Launch("distributed_worker.py", tmp_path_factory, RUNS[num_processes], num_processes)
    )
    return lambda num_processes, *run: launch(num_processes).results(*run)


def test_three_processes(launched):
    results = launched(3, "all")
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert max(error for result in results for error in result["errors"]) < 1e-5
    assert sum(result["owned"] for result in results) == results[0]["stored"] > 0
    assert len({tuple(result["packed_rows"]) for result in results}) == 1


@pytest.mark.parametrize("scenario", EVERYWHERE)
def test_processes_end_equal_with_the_reference_gradient(launched, scenario):
    first, second = launched(2, scenario)
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


needs_environments = pytest.mark.skipif(not HAS_ENVIRONMENTS, reason="episodes need gymnasium, and pictures")


@needs_environments
@pytest.mark.parametrize("scenario", EPISODES)
def test_episodes_of_several_processes_wait_for_each_other(launched, scenario):
    results = launched(2, scenario)
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
@pytest.mark.parametrize("num_processes", [2, 3])
def test_images_travel_with_their_rows(launched, num_processes):
    results = launched(num_processes, "images", "qwen2_vl")
    assert check_images(results, num_steps=5) == {"uniform", "replay"}
    assert len(results[0]["errors"]) == 5
    assert sum(result["sent_images"] for result in results) > 0


@needs_images
@pytest.mark.parametrize(("family", "num_processes"), [("qwen2_vl", 2), ("qwen2_vl", 3), ("llava_next", 2)])
def test_images_with_replay_and_pilot_commit(launched, family, num_processes):
    results = launched(num_processes, "images, all", family)
    assert check_images(results, num_steps=5) == {"pilot", "commit", "replay"}
    assert len(results[0]["errors"]) == 5
    assert sum(result["sent_images"] for result in results) > 0


@needs_images
def test_a_process_may_have_text_alone_while_another_has_images(launched):
    """The vision tower then has no gradient on one of them, which the other must not wait for."""
    results = launched(2, "images and text", "qwen2_vl")
    check_images(results, num_steps=12)
    by_step = list(zip(*(result["packed_images"] for result in results), strict=True))
    assert any(min(images) == 0 < max(images) for images in by_step)
    assert any(min(images) > 0 for images in by_step)
