"""Shared by the tests of the core: playing steps against a made-up model, and exact reference distributions."""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from scipy import stats

from rollwise import Batch, PilotCommit, Request, Rollout, RolloutScheduler

#: A chi-square test whose p-value is below this fails. With fixed seeds it either always fails or never.
P_BOUND = 1e-3

#: Reward of the i-th rollout of a request at a step.
RewardOf = Callable[[Request, int, int], float]


def always(reward: float) -> RewardOf:
    return lambda request, i, step: reward


def coin(rates: dict | float, seed: int = 0) -> RewardOf:
    """1 with the prompt's success rate, else 0; a function of prompt, step, purpose and i alone, so that it replays."""

    def reward_of(request: Request, i: int, step: int) -> float:
        rate = rates[request.prompt_id] if isinstance(rates, dict) else rates
        key = [seed, step, i, *request.purpose.encode(), *repr(request.prompt_id).encode()]
        return float(np.random.default_rng(key).random() < rate)

    return reward_of


def first(num_successes: int | dict) -> RewardOf:
    """The first `num_successes` of each request succeed."""

    def reward_of(request: Request, i: int, step: int) -> float:
        successes = num_successes[request.prompt_id] if isinstance(num_successes, dict) else num_successes
        return float(i < successes)

    return reward_of


def answer(
    requests: Sequence[Request], reward_of: RewardOf, step: int, *, num_tokens: int = 3, payload: bool = False
) -> list[Rollout]:
    """Rollouts that answer `requests`. With `payload`, arrays from which the rollout can be told."""
    rollouts = []
    for request in requests:
        for i in range(request.num_rollouts):
            reward = reward_of(request, i, step)
            rollout = Rollout(request.prompt_id, reward, num_tokens=num_tokens)
            if payload:
                name = sum(repr(request.prompt_id).encode()) + 1000 * len(request.purpose)
                rollout.payload = {
                    "ids": np.array([step, i, name] + [7] * (i % 3), dtype=np.int32),
                    "logps": np.array([reward, -0.1 * i], dtype=np.float32),
                }
                rollout.nbytes = sum(array.nbytes for array in rollout.payload.values())
            rollouts.append(rollout)
    return rollouts


def play_step(
    scheduler: RolloutScheduler,
    reward_of: RewardOf,
    *,
    step: int | None = None,
    max_asks: int = 50,
    told: list[Rollout] | None = None,
    **answer_options: object,
) -> tuple[list[list[Request]], Batch]:
    """One whole step: what every ask returned (without the last, empty one), and the batch."""
    asks: list[list[Request]] = []
    while requests := scheduler.ask(step):
        asks.append(requests)
        assert len(asks) <= max_asks, "the step does not end"
        rollouts = answer(requests, reward_of, scheduler.step, **answer_options)
        scheduler.tell(rollouts)
        if told is not None:
            told += rollouts
    return asks, scheduler.batch()


def count(requests: Sequence[Request], purpose: str | None = None) -> int:
    """Rollouts that the requests ask for."""
    return sum(r.num_rollouts for r in requests if purpose in (None, r.purpose))


def prompts_of(requests: Sequence[Request], purpose: str) -> list:
    return [r.prompt_id for r in requests if r.purpose == purpose]


def row_key(row) -> tuple:
    """A row by value, to compare the batches of two runs."""
    rollout = row.rollout
    identity = (rollout.prompt_id, rollout.birth_step, rollout.purpose, rollout.reward)
    return (*identity, row.advantage, row.age_steps, row.source)


def pilot_commit(**settings: object) -> PilotCommit:
    """Small, by the paper's rule for solved prompts, and without binding unless asked for."""
    defaults = {"train_prompts": 2, "pilot_rollouts": 8, "commit_rollouts": 4, "pilot_prompts": 4, "bind_pilots": False}
    defaults["solved_prompts"] = "remove"
    return PilotCommit(**(defaults | settings))


def sequential_probabilities(weights_N: Sequence[float], num_draws: int) -> dict[tuple[int, ...], float]:
    """Probability of each ordered draw without replacement, by enumeration."""
    probabilities = {}
    for order in permutations(range(len(weights_N)), num_draws):
        left, probability = list(range(len(weights_N))), 1.0
        for i in order:
            total = sum(weights_N[j] for j in left)
            probability *= weights_N[i] / total if total else 0.0
            left.remove(i)
        probabilities[order] = probability
    return probabilities


def chi_square_p_value(observed: dict, probabilities: dict) -> float:
    """p-value of the counts under the probabilities; cells that expect fewer than 5 are pooled."""
    total = sum(observed.values())
    assert set(observed) <= {key for key, p in probabilities.items() if p > 0}, "something impossible was drawn"
    counts, expected, pooled = [], [], [0.0, 0.0]
    for key, probability in probabilities.items():
        if probability * total >= 5:
            counts.append(observed.get(key, 0))
            expected.append(probability * total)
        else:
            pooled[0] += observed.get(key, 0)
            pooled[1] += probability * total
    if pooled[1] > 0:
        counts.append(pooled[0])
        expected.append(pooled[1])
    assert len(counts) > 1
    expected_array = np.array(expected) * (sum(counts) / sum(expected))  # rounding only
    return float(stats.chisquare(counts, expected_array).pvalue)
