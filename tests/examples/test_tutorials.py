"""Each tutorial runs, smaller than by itself, and what it shows is so."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TUTORIALS = sorted(path.stem for path in EXAMPLES.glob("tutorial_[0-9]*.py"))

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a tutorial in an empty folder; gives what its `main` returns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda number, **size: importlib.import_module(
        next(name for name in TUTORIALS if name.startswith(f"tutorial_{number}_"))
    ).main(**size)


@pytest.fixture(autouse=True)
def _forget_tutorials():
    yield
    for name in [name for name in sys.modules if name.startswith("tutorial_")]:
        del sys.modules[name]


def test_there_are_six():
    assert [name.split("_")[1] for name in TUTORIALS] == ["1", "2", "3", "4", "5", "6"]


def test_waste(run, capsys):
    found = run(1, steps=3, sampling_steps=1)
    assert found["rollouts"] == 3 * 256
    assert found["wasted_of_4"] > found["predicted"], "small groups waste more"
    assert 0.2 < found["wasted"] < 0.9
    assert abs(found["wasted"] - found["predicted"]) < 0.3
    assert "of what was generated moved nothing" in capsys.readouterr().out


def test_triage(run):
    found = run(2, budget=1_000)
    assert found["Pilot-Commit"]["useful"] > found["without thresholds"]["useful"]
    assert all(1_000 <= arm["rollouts"] < 2_500 for arm in found.values())


def test_replay_and_age(run):
    found = run(3, steps=13)
    assert min(found["drawn"]) >= 1
    assert max(found["drawn"]) <= 10, "the age bound"
    assert found["replayed"][:3] == [0, 0, 0]
    assert found["replayed"][3:] == found["fresh"][3:], "a replayed row per fresh one"
    young = {tau: share.get(1, 0) + share.get(2, 0) for tau, share in found["shares"].items()}
    assert young[1.0] > young[3.0] > young[None]


def test_effective_sample_size(run):
    found = run(4, steps=8, learning_rates=(1e-4, 1e-3))
    small, large = found[1e-4], found[1e-3]
    assert small["ess_token"]["1"] > 0.98
    assert large["ess_token"]["2-3"] < small["ess_token"]["2-3"]
    assert large["kl"]["2-3"] > large["kl"]["1"] > small["kl"]["1"]
    assert large["tau"] < small["tau"]
    assert large["auto"] < small["auto"]


def test_together(run):
    found = run(5, budget=2_400, arms=("plain GRPO", "both"))
    assert found["plain GRPO"]["replayed"] == 0
    assert found["plain GRPO"]["rollouts"] == 2_560
    assert found["both"]["replayed"] > 0
    assert found["both"]["trained on"] > found["plain GRPO"]["trained on"]
    assert all(0 < arm["accuracy"] < 1 for arm in found.values())


def test_simulation(run):
    found = run(6, pilot_steps=2, steps=10)
    assert found["prompts"] == 128
    figures = found["figures"]
    assert figures["uniform"]["a step"] == 32 * 16
    assert figures["uniform"]["useful"] == pytest.approx(1 - found["predicted"], abs=0.08)
    assert figures["belief"]["useful"] > figures["uniform"]["useful"]
