"""`GRPOConfig` with Rollwise's settings, and the list of settings that would make the result inexact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from trl import GRPOConfig

from rollwise.allocation import ALLOCATIONS, Allocation
from rollwise.errors import ConfigError
from rollwise.replay import Replay
from rollwise.replay.priority import named_priority
from rollwise.trl.checks import check_settings


@dataclass
class RollwiseGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` with allocation and replay.

    With the defaults the run is the stock trainer's run, number for number. Whatever TRL's config takes is taken
    here too; the metadata of each field below says what it does. `num_generations` stays the size of a group:
    with Pilot-Commit it is pilots and commits together. Prompts per step are
    `generation_batch_size / num_generations`, as in TRL.

    Raises:
        ConfigError: If a setting is out of its bounds.
        InexactSettingError: If a setting of TRL's would make replay or allocation inexact.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "allocation_kwargs"]

    allocation: Literal[
        "uniform", "pilot_commit", "belief", "dynamic_sampling", "history_skipping", "successive_elimination"
    ] = field(
        default="uniform",
        metadata={
            "help": "Which prompts get rollouts: 'uniform' (plain GRPO), 'pilot_commit', 'belief', 'dynamic_sampling' "
            "(DAPO), 'history_skipping' (GRESO) or 'successive_elimination' (Reinforce-Ada)."
        },
    )
    allocation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Further settings of the allocation, by their names in its class (rollwise.Belief, "
            "rollwise.DynamicSampling, ...), as a mapping or as JSON: '{\"half_life_steps\": 20}'."
        },
    )
    prompt_id_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of train_dataset with a stable, unique id of each prompt. With it a run can be resumed "
            "after the data set has grown or was reordered. None: row numbers; the data set must then be the same."
        },
    )
    belief_bucket_column: str | None = field(
        default=None,
        metadata={
            "help": "Belief allocation: column of train_dataset that says which prompts are alike: a level, a source, "
            "a number. None: the length of the prompt."
        },
    )
    eval_accuracy_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of eval_dataset, such as a difficulty level: the held-out accuracy is also logged for each "
            "of its values, as eval_rollwise/accuracy/<value>. A mean hides what is gained here and forgotten there."
        },
    )
    pilot_rollouts: int | None = field(
        default=None,
        metadata={
            "help": "Pilot-Commit and belief: pilot rollouts per prompt; the other num_generations - pilot_rollouts "
            "are its commits. None: a quarter of num_generations, at least 2."
        },
    )
    pilot_prompts: int | None = field(
        default=None,
        metadata={
            "help": "Pilot-Commit: prompts piloted per round, None: 3 times the prompts per step. Belief: prompts in "
            "the first wave, None: 3/2 of the prompts per step."
        },
    )
    p_lower: float = field(
        default=0.125,
        metadata={"help": "Pilot-Commit: below this success rate a prompt is too hard and waits for the next epoch."},
    )
    p_upper: float = field(
        default=0.75,
        metadata={"help": "Pilot-Commit: above this success rate a prompt is too easy."},
    )
    p_solve: float = field(
        default=1.0,
        metadata={"help": "Pilot-Commit: at or above this success rate a prompt is solved."},
    )
    easy_prompts: Literal["next_epoch", "remove"] = field(
        default="next_epoch",
        metadata={"help": "Pilot-Commit: what happens to too easy prompts: back in the next epoch, or removed."},
    )
    solved_prompts: Literal["retire", "remove", "next_epoch"] = field(
        default="retire",
        metadata={
            "help": "Pilot-Commit: what happens to solved prompts. 'retire': they leave after many successes in a row, "
            "and come back if a later check fails. 'remove' is the paper's rule: a few lucky pilots can empty a small "
            "pool. 'next_epoch': they stay."
        },
    )
    max_survivor_age_steps: int = field(
        default=4,
        metadata={"help": "Pilot-Commit: a survivor whose pilots are older than this is dropped."},
    )
    bind_pilots: bool = field(
        default=True,
        metadata={"help": "Pilot-Commit: generate the next step's pilots together with this step's commits."},
    )
    pilot_every_step: bool = field(
        default=True,
        metadata={
            "help": "Pilot-Commit: pilot a round in every step (the paper), or only while too few survivors wait."
        },
    )
    survivor_selection: Literal["random", "most_recent", "max_variance"] = field(
        default="random",
        metadata={"help": "Pilot-Commit: which survivors are committed to when more wait than a step takes."},
    )
    max_pilot_rounds: int = field(
        default=10,
        metadata={"help": "Pilot-Commit: rounds of pilots in one step; then it trains on what has survived."},
    )
    replay_ratio: float = field(
        default=0.0,
        metadata={"help": "Replay: rows drawn from the buffer per fresh row with a gradient. 0: no replay."},
    )
    replay_updates_per_fresh: int = field(
        default=0,
        metadata={
            "help": "Replay: updates on replayed rows alone after each one with fresh rows (K), without generating. "
            "They count as training steps."
        },
    )
    replay_alpha: float = field(
        default=0.5,
        metadata={"help": "Replay: exponent of the priority |advantage|; 0 draws uniformly."},
    )
    replay_epsilon: float = field(
        default=1e-6,
        metadata={"help": "Replay: added to |advantage|."},
    )
    replay_priority: str = field(
        default="advantage",
        metadata={
            "help": "Replay: what is drawn first: 'advantage' (its size), 'positive_advantage', 'reward', "
            "'abs_reward', 'group_std', 'td_error', 'uniform', 'recency', or a dotted path to a function of rollouts: "
            "my_module.my_priority."
        },
    )
    replay_composition: Literal["fresh_anchored", "pool"] = field(
        default="fresh_anchored",
        metadata={
            "help": "Replay: every batch holds its fresh rows whole and a draw from the buffer, or is drawn as a whole "
            "from a pool of fresh and stored rows."
        },
    )
    replay_unit: Literal["rollout", "group"] = field(
        default="rollout",
        metadata={"help": "Replay: draw single rollouts, or whole groups."},
    )
    replay_newcomers: Literal["own", "max"] = field(
        default="own",
        metadata={"help": "Replay: enter the buffer with one's own priority, or the largest until drawn once (PER)."},
    )
    replay_max_uses: int | None = field(
        default=None,
        metadata={"help": "Replay: a rollout leaves the buffer once drawn this often. None: no limit."},
    )
    replay_max_age_steps: int | None = field(
        default=10,
        metadata={"help": "Replay: rollouts older than this many training steps are never drawn. None: no bound."},
    )
    replay_max_age_versions: int | None = field(
        default=None,
        metadata={"help": "Replay: the age bound in policy versions, that is, batches of rollouts generated since."},
    )
    replay_max_age_kl: float | None = field(
        default=None,
        metadata={"help": "Replay: the age bound in measured cumulative KL, in nats per token."},
    )
    replay_decay_tau_steps: float | str | None = field(
        default=None,
        metadata={
            "help": "Replay: priorities decay as exp(-age / tau), age in training steps. 'auto': tau follows the "
            "measured effective sample size. None: no decay."
        },
    )
    replay_decay_tau_versions: float | None = field(
        default=None,
        metadata={"help": "Replay: the decay's tau in policy versions. None: no decay with them."},
    )
    replay_decay_tau_kl: float | None = field(
        default=None,
        metadata={
            "help": "Replay: the decay's tau in measured cumulative KL, in nats per token. None: no decay with it."
        },
    )
    replay_correction: Literal["clip", "truncated", "sequence_mask", "none"] = field(
        default="clip",
        metadata={
            "help": "Replay: what corrects the staleness of replayed rows: the clipped ratio to the stored behaviour "
            "log-probs, truncated importance weights, the clipped ratio without the rows whose sequence ratio is out "
            "of bounds, or nothing."
        },
    )
    replay_truncation_cap: float = field(
        default=2.0,
        metadata={"help": "Replay: largest importance weight with replay_correction 'truncated'."},
    )
    replay_mask_bound: float = field(
        default=1.1,
        metadata={
            "help": "Replay: with replay_correction 'sequence_mask', rows whose geometric mean of the token ratios is "
            "above this, or below its inverse, are masked."
        },
    )
    replay_per_beta: float | None = field(
        default=None,
        metadata={
            "help": "Replay: weigh replayed rows by (N P(i))^-beta, as PER does, from this beta on (0.4 in PER). None: "
            "no weights."
        },
    )
    replay_per_beta_steps: int = field(
        default=0,
        metadata={"help": "Replay: steps over which beta rises from replay_per_beta to 1. 0: it stays."},
    )
    replay_warmup_steps: int = field(
        default=20,
        metadata={"help": "Replay: training steps at the start without replay."},
    )
    replay_capacity_rollouts: int = field(
        default=30_000,
        metadata={"help": "Replay: the buffer holds at most this many rollouts, over all processes."},
    )
    replay_capacity_bytes: int = field(
        default=2 * 1024**3,
        metadata={"help": "Replay: the buffer holds at most this many bytes of rows, over all processes."},
    )
    replay_ess_bound: float = field(
        default=0.5,
        metadata={
            "help": "Replay: warn once if replayed tokens of some age have an effective sample size below this share."
        },
    )
    drop_zero_variance: bool | None = field(
        default=None,
        metadata={
            "help": "Whether rows of groups with equal rewards, which carry no gradient, also leave the loss "
            "normaliser. True makes the gradient larger by 1 / (1 - their share). None: as the methods' papers "
            "have it, True with replay or Pilot-Commit, False otherwise."
        },
    )
    success_threshold: float = field(
        default=1.0,
        metadata={"help": "A rollout succeeds if its reward is at least this."},
    )
    patience_prompts: int = field(
        default=1000,
        metadata={
            "help": "End the run, with a checkpoint and a message, once this many prompts in a row gave no gradient. "
            "0: never."
        },
    )
    budget_rollouts: int | None = field(
        default=None,
        metadata={
            "help": "End the run, with a checkpoint and an evaluation, once so many rollouts have been generated. "
            "None: only max_steps or num_train_epochs end it."
        },
    )
    reward_timeout_seconds: float | None = field(
        default=None,
        metadata={
            "help": "Score each rollout alone in a child process and leave it unscored if a reward function takes "
            "longer than this. None: reward functions are called as TRL calls them, without a limit."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_timeout_seconds is not None and not self.reward_timeout_seconds > 0:
            raise ConfigError(f"reward_timeout_seconds is {self.reward_timeout_seconds}; it must be above 0, or None")
        self.allocation_settings()
        self.replay_settings()
        check_settings(self)

    @property
    def is_active(self) -> bool:
        """Whether anything differs from the stock trainer."""
        return self.allocation != "uniform" or self.replay_settings().is_on or bool(self.drop_zero_variance)

    @property
    def drops_zero_variance(self) -> bool:
        """`drop_zero_variance` with None resolved."""
        return self.is_active if self.drop_zero_variance is None else self.drop_zero_variance

    @property
    def train_prompts(self) -> int:
        """Prompts per step, over all processes."""
        return int(self.generation_batch_size // self.num_generations)

    def allocation_settings(self, buckets: Sequence[int] | None = None) -> Allocation:
        """The core's settings of the chosen allocation.

        Args:
            buckets: The prompts' buckets, for belief allocation.

        Raises:
            ConfigError: If one of them is out of its bounds.
        """
        if self.allocation not in ALLOCATIONS:
            raise ConfigError(f"allocation is {self.allocation!r}; it must be one of {sorted(ALLOCATIONS)}")
        allocation_class = ALLOCATIONS[self.allocation]
        own = self._own_allocation_settings()
        further = self.allocation_kwargs or {}
        if not isinstance(further, dict):
            raise ConfigError(f"allocation_kwargs is {further!r}; give a mapping of settings, or JSON of one")
        known = {setting.name for setting in fields(allocation_class)} - {"buckets"}
        if unknown := sorted(set(further) - known):
            raise ConfigError(
                f"allocation_kwargs has {unknown}, which allocation {self.allocation!r} does not know; it knows "
                f"{sorted(known)}"
            )
        if twice := sorted(set(further) & set(own)):
            raise ConfigError(f"allocation_kwargs has {twice}, for which there are settings of their own; use those")
        if buckets is not None and self.allocation == "belief":
            own["buckets"] = buckets
        allocation: Allocation = allocation_class(**own, **further)
        return allocation

    def _own_allocation_settings(self) -> dict[str, Any]:
        """Those settings of the chosen allocation that have fields here."""
        own: dict[str, Any] = {"train_prompts": self.train_prompts}
        if self.allocation in ("uniform", "dynamic_sampling", "history_skipping"):
            own["num_rollouts"] = self.num_generations
        if self.allocation in ("uniform", "dynamic_sampling"):
            return own
        own["success_threshold"] = self.success_threshold
        if self.allocation in ("history_skipping", "successive_elimination"):
            return own
        pilots = max(2, self.num_generations // 4) if self.pilot_rollouts is None else self.pilot_rollouts
        if not 1 <= pilots < self.num_generations:
            raise ConfigError(
                f"pilot_rollouts is {pilots} of num_generations {self.num_generations}; it must be at least 1 and "
                "leave at least 1 for the commit"
            )
        if self.allocation == "belief":
            return own | {
                "first_rollouts": pilots,
                "second_rollouts": self.num_generations - pilots,
                "first_prompts": self.pilot_prompts,
            }
        return own | {
            "pilot_rollouts": pilots,
            "commit_rollouts": self.num_generations - pilots,
            "pilot_prompts": self.pilot_prompts,
            "p_lower": self.p_lower,
            "p_upper": self.p_upper,
            "p_solve": self.p_solve,
            "easy_prompts": self.easy_prompts,
            "solved_prompts": self.solved_prompts,
            "max_survivor_age_steps": self.max_survivor_age_steps,
            "bind_pilots": self.bind_pilots,
            "pilot_every_step": self.pilot_every_step,
            "survivor_selection": self.survivor_selection,
            "max_pilot_rounds": self.max_pilot_rounds,
        }

    def replay_settings(self) -> Replay:
        """The core's settings of replay.

        Raises:
            ConfigError: If one of them is out of its bounds.
        """
        try:
            return Replay(
                ratio=self.replay_ratio,
                updates_per_fresh=self.replay_updates_per_fresh,
                alpha=self.replay_alpha,
                epsilon=self.replay_epsilon,
                composition=self.replay_composition,
                unit=self.replay_unit,
                priority=named_priority(self.replay_priority),
                newcomers=self.replay_newcomers,
                max_uses=self.replay_max_uses,
                max_age_steps=self.replay_max_age_steps,
                max_age_versions=self.replay_max_age_versions,
                max_age_kl=self.replay_max_age_kl,
                decay_tau_steps=_number_or_name(self.replay_decay_tau_steps),
                decay_tau_versions=self.replay_decay_tau_versions,
                decay_tau_kl=self.replay_decay_tau_kl,
                per_beta=self.replay_per_beta,
                per_beta_steps=self.replay_per_beta_steps,
                warmup_steps=self.replay_warmup_steps,
                capacity_rollouts=self.replay_capacity_rollouts,
                capacity_bytes=self.replay_capacity_bytes,
            )
        except ConfigError as error:  # its messages begin with the core's name of the setting
            raise ConfigError(f"replay_{error}") from error


def _number_or_name(value: float | str | None) -> Any:
    """A flag's text as a number, if it is one; other texts are for `Replay` to judge."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
