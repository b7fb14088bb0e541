"""Reward functions that cannot take a run down: what they fail to score is unscored, never 0.

TRL calls a reward function once with all completions of a batch. If that call raises, the function is asked again
for one completion at a time, so that only those it cannot score are left unscored.
"""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rollwise.errors import RewardError

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]


def guard(reward: Any, timeout_seconds: float | None = None) -> Any:
    """Wrap a reward function; models, names and async functions with no timeout semantics are told apart.

    Args:
        reward: What `GRPOTrainer` takes as one of its `reward_funcs`.
        timeout_seconds: Time limit for one completion. With it, every completion is scored alone, in a child
            process that is killed when the time is up: what the function changes in memory stays in that process.

    Returns:
        A function with the same name and signature, or `reward` itself if it is a model or a model's name.

    Raises:
        RewardError: When called: if the function has never worked and fails for every completion.
    """
    if isinstance(reward, str) or not callable(reward) or hasattr(reward, "parameters"):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    guarded = _guard_async(reward, name) if _is_async(reward) else _guard_sync(reward, name, timeout_seconds)
    guarded.__name__ = name
    return guarded


def _is_async(reward: Any) -> bool:
    call = type(reward).__call__ if not inspect.isroutine(reward) else None
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


def _guard_sync(reward: RewardFunction, name: str, timeout_seconds: float | None) -> RewardFunction:
    health = _Health(name)

    @functools.wraps(reward)
    def guarded(**kwargs: Any) -> Any:
        if timeout_seconds is not None:
            scores, errors = _score_in_child(reward, _single_calls(kwargs), timeout_seconds)
            health.report(errors, len(scores))
            return scores
        try:
            scores = reward(**kwargs)
        except Exception as error:  # noqa: BLE001 - reported; the completions are tried one by one
            health.report_batch(error)
            singles = _Singles()
            for call in _single_calls(kwargs):
                with singles.scoring():
                    singles.scores.append(_only(reward(**call)))
            health.report(singles.errors, len(singles.scores))
            return singles.scores
        health.has_worked = True
        return scores

    return guarded


def _guard_async(reward: RewardFunction, name: str) -> RewardFunction:
    health = _Health(name)

    @functools.wraps(reward)
    async def guarded(**kwargs: Any) -> Any:
        try:
            scores = await reward(**kwargs)
        except Exception as error:  # noqa: BLE001 - reported; the completions are tried one by one
            health.report_batch(error)
            singles = _Singles()
            for call in _single_calls(kwargs):
                with singles.scoring():
                    singles.scores.append(_only(await reward(**call)))
            health.report(singles.errors, len(singles.scores))
            return singles.scores
        health.has_worked = True
        return scores

    return guarded


class _Singles:
    """Scores of completions scored alone: None where that raised, and the errors."""

    def __init__(self) -> None:
        self.scores: list[Any] = []
        self.errors: list[Exception] = []

    @contextmanager
    def scoring(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `_Health` reports it
            self.scores.append(None)
            self.errors.append(error)


class _Health:
    """Tells a function that is broken from one that fails for some completions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_worked = False

    def report_batch(self, error: Exception) -> None:
        logger.warning("reward function %r raised %r; its completions are now scored one by one", self.name, error)

    def report(self, errors: list[Exception], num_completions: int) -> None:
        if len(errors) < num_completions:
            self.has_worked = True
        elif not self.has_worked:
            raise RewardError(
                f"reward function {self.name!r} failed for each of the first {num_completions} completions, the "
                f"last time with {errors[-1]!r}; mend it before training"
            ) from errors[-1]
        if errors:
            logger.warning(
                "reward function %r failed for %d of %d completions, which are left unscored; the last error was %r",
                self.name,
                len(errors),
                num_completions,
                errors[-1],
            )


def _single_calls(kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The keyword arguments of one call per completion. Logging hooks stay out: a row must be logged once."""
    num_completions = len(kwargs["completions"])
    hooks: dict[str, Any] = {name: lambda *_: None for name in ("log_extra", "log_metric") if name in kwargs}
    return [
        {
            name: [value[i]] if isinstance(value, list) and len(value) == num_completions else value
            for name, value in kwargs.items()
        }
        | hooks
        for i in range(num_completions)
    ]


def _only(scores: Any) -> Any:
    (score,) = scores
    return score


def _score_in_child(
    reward: RewardFunction, calls: list[dict[str, Any]], timeout_seconds: float
) -> tuple[list[float | None], list[Exception]]:
    """Score each call in a forked process, which is replaced when a call hangs or takes the process down.

    A thread could not be stopped, and a signal works in the main thread alone. A fork needs nothing of the
    function but that it can be called.
    """
    context = multiprocessing.get_context("fork")
    scores: list[float | None] = [None] * len(calls)
    errors: list[Exception] = []
    done = 0
    while done < len(calls):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(reward, calls[done:], sender), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12+ warns that a fork copies locks other threads may hold; a child that hangs is killed.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        try:
            while done < len(calls):
                if not receiver.poll(timeout_seconds):
                    errors.append(TimeoutError(f"no reward within reward_timeout_seconds={timeout_seconds}"))
                    done += 1
                    break
                try:
                    score, error = receiver.recv()
                except EOFError:
                    errors.append(RuntimeError("the process that computed the reward died"))
                    done += 1
                    break
                scores[done] = score
                if error is not None:
                    errors.append(RuntimeError(error))
                done += 1
        finally:
            process.kill()
            process.join()
            process.close()
            receiver.close()
    return scores, errors


def _serve(reward: RewardFunction, calls: list[dict[str, Any]], sender: Connection) -> None:
    for call in calls:
        try:
            score = _only(reward(**call))
            sender.send((None if score is None else float(score), None))
        except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it
            sender.send((None, repr(error)))
