import io
import logging

import pytest
from rich.console import Console

from rollwise.commands.view import ProgressView, quiet_libraries, sparkline


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def figures(step, success_rate=0.4):
    """What the trainer logs after a step."""
    return {
        "loss": 0.1,
        "rollwise/success_rate": success_rate,
        "rollwise/rollouts_generated": 1000.0 * step,
        "rollwise/rollouts_trained": 600.0 * step,
        "rollwise/rollouts_wasted": 400.0 * step,
        "rollwise/rows_replayed": 300.0 * step,
        "rollwise/age_mean": 3.25,
        "rollwise/buffer_rollouts": 5000.0,
    }


def run_twelve_steps(view, clock):
    """Tell a view what a run of 20 steps tells it until step 12: one second a step, ten for the first evaluation."""
    view.phase("loading the model")
    view.run("demo", "replay", goal="until 0.600")
    view.begin(0, 20)
    view.phase("evaluating on held-out problems", 1, 4)
    clock.now += 10.0
    view.log({"eval_rollwise/accuracy": 0.25})
    for step in range(1, 13):
        view.phase("training")
        clock.now += 1.0
        view.step(step)
        view.log(figures(step, 0.3 + step / 100))
        if step in (6, 12):
            view.phase("evaluating on held-out problems", 1, 4)
            clock.now += 1.0
            view.log({"eval_rollwise/accuracy": 0.25 + step / 50})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(clock, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    console = Console(file=io.StringIO(), width=300)
    return ProgressView(console, clock=clock)


def test_the_panel_holds_the_numbers(plain, clock):
    run_twelve_steps(plain, clock)
    console = Console(file=io.StringIO(), width=100)
    plain.console = console
    console.print(plain.render())
    text = console.file.getvalue()
    for words in (
        "demo  replay",
        "step 12/20",
        "evaluating on held-out problems 1/4",
        "0.490",
        "from 0.250 at the start",
        "until 0.600",
        "0.420",
        "12,000 generated",
        "7,200 trained",
        "4,800 wasted (40%)",
        "3,600 rows",
        "mean age 3.2 steps",
        "5,000 in the buffer",
        "at most 9 s left",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [20, 40, 80, 250])
def test_the_panel_fits_any_terminal(plain, clock, width):
    run_twelve_steps(plain, clock)
    plain.console = Console(file=io.StringIO(), width=width)
    plain.console.print(plain.render())
    lines = plain.console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 100)


def test_before_the_first_step_the_panel_says_what_goes_on(plain, clock):
    plain.phase("loading PyTorch and TRL")
    clock.now = 7.0
    console = Console(file=io.StringIO(), width=80)
    console.print(plain.render())
    text = console.file.getvalue()
    assert "loading PyTorch and TRL" in text
    assert "7 s" in text
    assert "rollouts" not in text


def test_time_left_leaves_out_the_first_evaluation(plain, clock):
    plain.begin(0, 20)
    plain.phase("evaluating on held-out problems")
    clock.now = 100.0
    assert plain.seconds_left() is None
    plain.phase("training")
    clock.now = 104.0
    plain.step(2)
    assert plain.seconds_left() == pytest.approx(36.0)


def test_time_left_is_bounded_by_a_limit(plain, clock):
    plain.run("demo-baseline", "plain GRPO", goal="until 0.600", most_seconds=60.0)
    clock.now = 100.0  # loading does not count
    plain.begin(0, 1000)
    plain.phase("training")
    clock.now = 110.0
    plain.step(5)
    assert plain.seconds_left() == pytest.approx(50.0)


def test_time_left_of_a_resumed_run_counts_its_own_steps(plain, clock):
    plain.begin(10, 20)
    plain.phase("training")
    clock.now = 3.0
    plain.step(11)
    assert plain.seconds_left() == pytest.approx(27.0)


def test_plain_lines_come_every_few_seconds_and_at_each_evaluation(plain, clock):
    run_twelve_steps(plain, clock)
    lines = plain.console.file.getvalue().splitlines()
    assert lines[0] == "loading the model …"
    assert lines[1] == "demo: evaluating on held-out problems …"
    assert lines[2] == "demo: step 0/20 | held-out accuracy 0.250"
    steps = [line for line in lines[3:] if line.startswith("demo: step")]
    assert len(steps) == 4  # after 5 seconds, and at the evaluations after steps 6 and 12
    assert steps[-1] == (
        "demo: step 12/20 | held-out accuracy 0.490 | success rate 0.420 | rollouts 12,000 generated, 7,200 trained, "
        "4,800 wasted | 3,600 rows replayed | at most 9 s left"
    )


def test_a_view_that_is_off_prints_nothing(clock):
    console = Console(file=io.StringIO(), width=100)
    view = ProgressView(console, enabled=False, clock=clock)
    with view:
        run_twelve_steps(view, clock)
        view.note("a note")
    assert console.file.getvalue() == ""


def terminal():
    return Console(file=io.StringIO(), width=100, force_terminal=True, _environ={"TERM": "xterm"})


def test_a_terminal_gets_a_live_panel(clock, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    console = terminal()
    with ProgressView(console, clock=clock) as view:
        run_twelve_steps(view, clock)
        view.note("a note [not markup]")
    text = console.file.getvalue()
    assert "╭" in text
    assert "a note [not markup]" in text
    assert "demo: step" not in text


def test_in_ci_a_terminal_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("CI", "true")
    console = terminal()
    with ProgressView(console, clock=clock) as view:
        run_twelve_steps(view, clock)
    assert "╭" not in console.file.getvalue()
    assert "step 12/20" in console.file.getvalue()


def test_library_warnings_become_notes_and_everything_is_put_back(plain):
    import datasets

    logger = logging.getLogger("rollwise")
    before = (logger.handlers, logger.propagate, datasets.are_progress_bars_disabled())
    with quiet_libraries(plain):
        logging.getLogger("rollwise.trl").warning("a reward failed %d times", 3)
        logging.getLogger("rollwise.trl").info("nothing to see")
        assert datasets.are_progress_bars_disabled()
    assert plain.console.file.getvalue() == "warning: a reward failed 3 times\n"
    assert (logger.handlers, logger.propagate, datasets.are_progress_bars_disabled()) == before


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(100)), width=24)) == 24
