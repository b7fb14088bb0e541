"""Off means off: without a block, the run is stock verl's run.

Up to rounding: rows come back from verl's asynchronous agent loop, and are summed in the order in which they come.
"""

import pytest
from launch import launch

# What must agree: everything that is computed, nothing that is measured with a clock or depends on the machine.
PREFIXES = ("actor/", "critic/", "response_length", "prompt_length", "rollout_corr/", "training/", "num_turns")
STEPS = 3


def computed(figures):
    return {
        name: value
        for name, value in figures.items()
        if name.startswith(PREFIXES) and not name.startswith("actor/perf")
    }


@pytest.fixture(scope="module")
def runs(inputs):
    stock = launch(inputs, "stock", main="verl.trainer.main_ppo", steps=STEPS)
    off = launch(inputs, "off", steps=STEPS)
    for run in (stock, off):
        assert run.exit_code == 0, run.output[-5000:]
    return stock, off


def test_every_figure_of_every_step_is_the_stock_runs(runs):
    stock, off = runs
    assert len(stock.steps) == len(off.steps) == STEPS
    assert any(step["actor/grad_norm"] > 0 for step in stock.steps)
    for expected, actual in zip(stock.steps, off.steps, strict=True):
        assert computed(actual) == pytest.approx(computed(expected), rel=1e-4, abs=1e-5)


def test_what_was_generated_is_counted(runs):
    _, off = runs
    last = off.steps[-1]
    requests = (off.folder / "requests.jsonl").read_text().splitlines()
    assert last["rollwise/rollouts_generated"] == len(requests) == STEPS * 16
    trained = sum(step["rollwise/step_rows_fresh"] for step in off.steps)
    assert last["rollwise/rollouts_trained"] == trained > 0
    assert last["rollwise/rollouts_wasted"] == STEPS * 16 - trained
