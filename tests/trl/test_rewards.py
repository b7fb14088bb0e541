"""Reward functions that fail, hang, or take their process down."""

import asyncio
import os
import threading
import time

import pytest

from rollwise import RewardError
from rollwise.trl.rewards import guard

COMPLETIONS = ["a", "bb", "ccc", "dddd"]


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def picky(completions, **kwargs):
    if "bb" in completions:
        raise ValueError("no bb")
    return length(completions)


def test_a_sound_function_is_called_once_with_everything():
    calls = []

    def recording(completions, answer, **kwargs):
        calls.append((completions, answer, kwargs))
        return [1.0] * 4

    guarded = guard(recording)
    assert guarded(completions=COMPLETIONS, answer=[1, 2, 3, 4], trainer_state="state") == [1.0] * 4
    assert calls == [(COMPLETIONS, [1, 2, 3, 4], {"trainer_state": "state"})]
    assert guarded.__name__ == "recording"


def test_only_the_completion_that_fails_is_unscored(caplog):
    assert guard(picky)(completions=COMPLETIONS) == [1.0, None, 3.0, 4.0]
    assert "'picky' failed for 1 of 4 completions" in caplog.text
    assert "no bb" in caplog.text


def test_columns_follow_their_completion():
    def right(completions, answer, shared, **kwargs):
        if len(completions) > 1:
            raise ValueError("one at a time")
        return [answer[0] + shared[-1]]

    assert guard(right)(completions=COMPLETIONS, answer=[1, 2, 3, 4], shared=[0, 0.5]) == [1.5, 2.5, 3.5, 4.5]


def test_logging_hooks_are_not_called_twice():
    logged = []

    def logs(completions, log_metric, **kwargs):
        log_metric("length", len(completions))
        if len(completions) > 1:
            raise ValueError("one at a time")
        return [1.0]

    guard(logs)(completions=COMPLETIONS, log_metric=lambda name, value: logged.append(value))
    assert logged == [4]


def test_a_function_that_never_worked_is_an_error_and_one_that_did_is_not():
    broken = {"now": True}

    def sometimes(completions, **kwargs):
        if broken["now"]:
            raise OSError("judge is down")
        return length(completions)

    guarded = guard(sometimes)
    with pytest.raises(RewardError, match="judge is down") as caught:
        guarded(completions=COMPLETIONS)
    assert isinstance(caught.value.__cause__, OSError)
    broken["now"] = False
    assert guarded(completions=COMPLETIONS) == [1.0, 2.0, 3.0, 4.0]
    broken["now"] = True
    assert guarded(completions=COMPLETIONS) == [None] * 4


def test_async_functions():
    async def slow_picky(completions, **kwargs):
        await asyncio.sleep(0)
        return picky(completions)

    guarded = guard(slow_picky)
    assert asyncio.iscoroutinefunction(guarded)
    assert asyncio.run(guarded(completions=COMPLETIONS)) == [1.0, None, 3.0, 4.0]


def test_models_and_names_pass_through():
    model = type("Model", (), {"parameters": None, "__call__": lambda self: None})()
    assert guard(model) is model
    assert guard("org/reward-model") == "org/reward-model"


def test_a_callable_object_keeps_its_class_name():
    class Judge:
        def __call__(self, completions, **kwargs):
            return length(completions)

    assert guard(Judge()).__name__ == "Judge"


# --- with a time limit --------------------------------------------------------------------------------------------


def hangs(completions, **kwargs):
    while completions == ["bb"]:
        pass
    return length(completions)


def dies(completions, **kwargs):
    if completions == ["bb"]:
        os._exit(1)
    return length(completions)


@pytest.mark.parametrize(("function", "reason"), [(hangs, "reward_timeout_seconds=0.3"), (dies, "died")])
def test_hanging_and_dying_functions_cost_their_completion_and_bounded_time(function, reason, caplog):
    started = time.monotonic()
    assert guard(function, 0.3)(completions=COMPLETIONS) == [1.0, None, 3.0, 4.0]
    assert time.monotonic() - started < 10
    assert reason in caplog.text


def test_the_limit_works_from_a_thread():
    """Where signals do not: a verifier's time-out that fails in a thread has silently become a reward of 0."""
    results = []
    thread = threading.Thread(target=lambda: results.append(guard(hangs, 0.3)(completions=COMPLETIONS)))
    thread.start()
    thread.join(timeout=20)
    assert results == [[1.0, None, 3.0, 4.0]]


def test_errors_in_the_child_are_reported(caplog):
    assert guard(picky, 5.0)(completions=COMPLETIONS) == [1.0, None, 3.0, 4.0]
    assert "no bb" in caplog.text
    with pytest.raises(RewardError, match="no bb"):
        guard(picky, 5.0)(completions=["bb"])


def test_missing_and_infinite_scores_come_through():
    def odd(completions, **kwargs):
        return [{"a": None, "bb": float("inf"), "ccc": 3, "dddd": 0.5}[completions[0]]]

    assert guard(odd, 5.0)(completions=COMPLETIONS) == [None, float("inf"), 3.0, 0.5]
