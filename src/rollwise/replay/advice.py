"""What to change where replay's settings do not do what they seem to."""

from __future__ import annotations

import math

from rollwise.replay.buffer import ReplayBuffer
from rollwise.replay.settings import Replay

#: Below this, the difference that decay makes between the youngest and the oldest is none.
_LEAST_FALL = 0.05
#: Rollouts of priority 0 are starved if they are at least this share of the buffer ...
_LEAST_SHARE = 0.1
#: ... and are drawn this much less often than their share.
_LEAST_RATE = 0.1


def idle_decay_advice(settings: Replay, max_steps: int) -> str | None:
    """What to change if decay cannot have an effect in a run of `max_steps` steps; None if all is well.

    At a draw no rollout is older than L = min(age bound, steps of the run), so the oldest keeps exp(-alpha L / tau) of
    its weight. That of 95% and more is told.
    """
    for clock, tau, bound in (
        ("steps", settings.decay_tau_steps, settings.max_age_steps),
        ("versions", settings.decay_tau_versions, settings.max_age_versions),
    ):
        if tau is None or isinstance(tau, str):
            continue
        oldest = max_steps if bound is None else min(bound, max_steps)
        kept = math.exp(-settings.alpha * oldest / tau)
        if kept >= 1 - _LEAST_FALL:
            return (
                f"replay's decay_tau_{clock} is {tau:g}, and in this run no rollout is drawn that is older than "
                f"{oldest} {clock}: the oldest keeps {kept:.0%} of its weight, so decay has no effect; set it to about "
                f"{max(1.0, settings.alpha * oldest):.3g}, or to None"
            )
    return None


def starvation_advice(buffer: ReplayBuffer) -> str | None:
    """What to change if rollouts of priority 0 are hardly ever drawn; None if all is well."""
    held, drawn = buffer.starved_share()
    if held < _LEAST_SHARE or drawn >= _LEAST_RATE * held:
        return None
    name = buffer.settings.priority
    return (
        f"{held:.0%} of what is stored has priority 0 under {getattr(name, '__name__', name)!r} and makes up "
        f"{drawn:.1%} of what is drawn: with rewards of 0 and 1, wrong answers are never replayed; use the priority "
        "'advantage', raise epsilon, or lower alpha"
    )
