"""Every generated rollout, counted once: what it was made for and what became of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollwise.errors import StateError
from rollwise.files import replacing
from rollwise.rollout import Rollout

TRAINED = "trained"
PENDING = "pending"
#: What can become of a generated rollout. All but `trained` and `pending` are waste.
OUTCOMES = (
    TRAINED,  # reached a gradient
    PENDING,  # waits: in the survivor buffer for its commits, or in the replay pool for its first draw
    "zero_variance",  # its group's rewards were all equal
    "solved",  # pilot of a prompt at or above p_solve
    "too_easy",  # pilot of a prompt above p_upper
    "too_hard",  # pilot of a prompt below p_lower
    "aged_out",  # pilot of a survivor that waited too long, or left the replay pool without having been drawn
    "surplus",  # teaches, but the batch was full
    "downsampled",  # left out of its group, which varies more without it
    "unscored",  # no reward could be computed
    "truncated",  # all its tokens are masked out of the loss
    "padding",  # generated only to give every process the same number
)


class Ledger:
    """Counts of generated rollouts by (birth step, purpose, outcome), and of replayed rows by step.

    A rollout enters as `pending` when it is told and is settled once, so at any moment the counts sum to the
    number of completions the model produced. Replayed rows cost no generation and are counted apart.
    """

    def __init__(self) -> None:
        self._generated: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._replayed: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def record(self, rollouts: Iterable[Rollout]) -> None:
        """Count rollouts that were just generated."""
        for rollout in rollouts:
            entry = self._generated[rollout.birth_step, rollout.purpose, PENDING]
            entry[0] += 1
            entry[1] += rollout.num_tokens

    def settle(self, rollouts: Iterable[Rollout], outcome: str) -> None:
        """Say what became of rollouts that were pending."""
        for rollout in rollouts:
            pending = self._generated[rollout.birth_step, rollout.purpose, PENDING]
            final = self._generated[rollout.birth_step, rollout.purpose, outcome]
            for entry, sign in ((pending, -1), (final, 1)):
                entry[0] += sign
                entry[1] += sign * rollout.num_tokens

    def discard(self, rollouts: Sequence[Rollout], outcome: str) -> None:
        """Settle rollouts that are not trained on: the scored ones with `outcome`, the others as unscored."""
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        self.settle(scored, outcome)
        if len(scored) < len(rollouts):
            self.settle([rollout for rollout in rollouts if not rollout.is_scored], "unscored")

    def record_padding(self, step: int, num_rollouts: int, num_tokens: int) -> None:
        """Count completions generated only to give every process the same number."""
        entry = self._generated[step, "padding", "padding"]
        entry[0] += num_rollouts
        entry[1] += num_tokens

    def record_replayed(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """Count rows that step `step` trained on again."""
        for rollout in rollouts:
            self._replayed[step][0] += 1
            self._replayed[step][1] += rollout.num_tokens

    def by_outcome(self) -> dict[str, int]:
        """Generated rollouts per outcome, over the whole run."""
        totals = dict.fromkeys(OUTCOMES, 0)
        for (_, _, outcome), (rollouts, _) in self._generated.items():
            totals[outcome] += rollouts
        return totals

    def by_purpose(self) -> dict[str, int]:
        """Generated rollouts per purpose, over the whole run."""
        totals: dict[str, int] = {}
        for (_, purpose, _), (rollouts, _) in self._generated.items():
            totals[purpose] = totals.get(purpose, 0) + rollouts
        return totals

    def totals(self) -> dict[str, int]:
        """The run's totals: rollouts generated, trained, pending and wasted, rows replayed, tokens."""
        outcomes = self.by_outcome()
        generated = sum(outcomes.values())
        return {
            "rollouts_generated": generated,
            "rollouts_trained": outcomes[TRAINED],
            "rollouts_pending": outcomes[PENDING],
            "rollouts_wasted": generated - outcomes[TRAINED] - outcomes[PENDING],
            "rows_replayed": sum(rows for rows, _ in self._replayed.values()),
            "tokens_generated": sum(tokens for _, tokens in self._generated.values()),
        }

    def records(self) -> list[dict[str, Any]]:
        """The counts as records with the columns kind, step, purpose, outcome, rollouts, tokens.

        `kind` is `"generated"` (step is the birth step; these sum to all completions produced) or
        `"replayed"` (step is the step that trained on the rows again).
        """
        generated = [
            {"kind": "generated", "step": step, "purpose": purpose, "outcome": outcome}
            | {"rollouts": rollouts, "tokens": tokens}
            for (step, purpose, outcome), (rollouts, tokens) in sorted(self._generated.items())
            if rollouts
        ]
        replayed = [
            {"kind": "replayed", "step": step, "purpose": "replay", "outcome": TRAINED}
            | {"rollouts": rows, "tokens": tokens}
            for step, (rows, tokens) in sorted(self._replayed.items())
        ]
        return generated + replayed

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `records()` as a Parquet file, atomically; pandas, Polars and DuckDB open it.

        Needs pyarrow (`pip install 'rollwise[trl]'`).
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [(name, pa.string()) for name in ("kind", "purpose", "outcome")]
            + [(name, pa.int64()) for name in ("step", "rollouts", "tokens")]
        )
        with replacing(path) as partial:
            pq.write_table(pa.Table.from_pylist(self.records(), schema=schema), partial)
        return Path(path)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on counting, as plain lists."""
        return {
            "generated": [[*key, *value] for key, value in sorted(self._generated.items()) if value[0]],
            "replayed": [[step, *value] for step, value in sorted(self._replayed.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`.

        Raises:
            StateError: If it holds an outcome that this version does not know.
        """
        unknown = {row[2] for row in state["generated"]} - set(OUTCOMES)
        if unknown:
            raise StateError(
                f"the ledger holds unknown outcomes {sorted(unknown)}; known are {OUTCOMES}; "
                "use the version of rollwise that wrote it"
            )
        self._generated.clear()
        self._replayed.clear()
        for step, purpose, outcome, rollouts, tokens in state["generated"]:
            self._generated[step, purpose, outcome] = [rollouts, tokens]
        for step, rows, tokens in state["replayed"]:
            self._replayed[step] = [rows, tokens]
