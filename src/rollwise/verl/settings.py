"""The `rollwise:` block of verl's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollwise.allocation import ALLOCATIONS, Allocation
from rollwise.bounds import check_at_least, check_choices
from rollwise.errors import ConfigError
from rollwise.replay import Replay
from rollwise.replay.priority import named_priority

#: Settings of the allocations that are verl's own settings under another name.
_OF_VERL = {
    "train_prompts": "data.train_batch_size",
    "num_rollouts": "actor_rollout_ref.rollout.n",
    "success_threshold": "rollwise.success_threshold",
    "buckets": "rollwise.bucket_column",
}
#: Allocations in two waves: the settings of the first and of the second, which make up `rollout.n` together.
_WAVES = {
    "pilot_commit": ("pilot_rollouts", "commit_rollouts"),
    "belief": ("first_rollouts", "second_rollouts"),
}


@dataclass(frozen=True, kw_only=True)
class RollwiseSettings:
    """The block's settings. With the defaults the run is stock verl's run, number for number.

    Attributes:
        allocation: `name` (a key of `rollwise.allocation.ALLOCATIONS`) and settings of that class. Prompts per step are
            `data.train_batch_size`, rollouts per prompt `actor_rollout_ref.rollout.n`: with Pilot-Commit pilots and
            commits together, a quarter of them pilots unless `pilot_rollouts` is given.
        replay: Settings of `rollwise.Replay`; None, or ratio 0: no replay. A `priority` may be a dotted path to a
            function of rollouts.
        seed: Seed of all of the scheduler's decisions.
        drop_zero_variance: See `rollwise.RolloutScheduler`; None: true where replay or an allocation is on.
        success_threshold: A rollout succeeds if its reward is at least this.
        patience_prompts: The run ends, with a checkpoint, once so many prompts in a row gave no gradient; 0: never.
        budget_rollouts: The run ends, with a checkpoint, once so many rollouts have been generated; None: never.
        prompt_id_column: Column of the data set with a stable id of each prompt, for allocations that choose prompts.
            None: row numbers; a resumed run must then have the same data set.
        bucket_column: Belief allocation: column that says which prompts are alike; None: the length of the prompt.
        payload_store: Where the rows of stored rollouts live: on the "driver", or "sharded" over Ray actors.
        payload_shards: Number of those actors.
        ess_bound: Warn once if replayed tokens of some age have an effective sample size below this share.
        poll_seconds: How often the driver looks whether the rollouts it has asked for are there.
    """

    allocation: Mapping[str, Any] = field(default_factory=lambda: {"name": "uniform"})
    replay: Mapping[str, Any] | None = None
    seed: int = 0
    drop_zero_variance: bool | None = None
    success_threshold: float = 1.0
    patience_prompts: int = 1000
    budget_rollouts: int | None = None
    prompt_id_column: str | None = None
    bucket_column: str | None = None
    payload_store: Literal["driver", "sharded"] = "driver"
    payload_shards: int = 8
    ess_bound: float = 0.5
    poll_seconds: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(self, 1, "payload_shards")
        check_at_least(self, 1, "budget_rollouts", or_none=True)
        check_choices(self, payload_store=("driver", "sharded"))
        if not self.poll_seconds > 0:
            raise ConfigError(f"rollwise.poll_seconds is {self.poll_seconds}; it must be above 0")
        if not 0 <= self.ess_bound <= 1:
            raise ConfigError(f"rollwise.ess_bound is {self.ess_bound}; it must be between 0 and 1")
        if self.allocation_name not in ALLOCATIONS:
            raise ConfigError(
                f"rollwise.allocation.name is {self.allocation_name!r}; it must be one of {sorted(ALLOCATIONS)}"
            )
        self.replay_settings()

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | None) -> RollwiseSettings:
        """The settings of a `rollwise:` block; None: the defaults.

        Raises:
            ConfigError: If it has a setting that there is none of, or one is out of its bounds.
        """
        block = block or {}
        known = [setting.name for setting in fields(cls)]
        if unknown := sorted(set(block) - set(known)):
            raise ConfigError(f"the rollwise block has {unknown}; it knows {known}")
        return cls(**block)

    @property
    def allocation_name(self) -> str:
        """The allocation's key in `rollwise.allocation.ALLOCATIONS`."""
        return str(self.allocation.get("name", "uniform"))

    @property
    def is_active(self) -> bool:
        """Whether anything differs from stock verl."""
        return self.allocation_name != "uniform" or self.replay_settings().is_on or bool(self.drop_zero_variance)

    @property
    def drops_zero_variance(self) -> bool:
        """`drop_zero_variance` with None resolved."""
        return self.is_active if self.drop_zero_variance is None else self.drop_zero_variance

    def allocation_settings(
        self, train_prompts: int, num_rollouts: int, buckets: Sequence[int] | None = None
    ) -> Allocation:
        """The core's settings of the allocation.

        Args:
            train_prompts: `data.train_batch_size`.
            num_rollouts: `actor_rollout_ref.rollout.n`.
            buckets: The prompts' buckets, for belief allocation.

        Raises:
            ConfigError: If one of them is unknown, is verl's own, or is out of its bounds.
        """
        allocation_class = ALLOCATIONS[self.allocation_name]
        given = {name: value for name, value in self.allocation.items() if name != "name"}
        known = {setting.name for setting in fields(allocation_class)}
        for name in given:
            if name in _OF_VERL:
                raise ConfigError(f"rollwise.allocation.{name} is {_OF_VERL[name]} here; set that")
            if name not in known:
                raise ConfigError(
                    f"rollwise.allocation has {name!r}, which allocation {self.allocation_name!r} does not know; it "
                    f"knows {sorted(known - set(_OF_VERL))}"
                )
        verls: dict[str, Any] = {"train_prompts": train_prompts, "num_rollouts": num_rollouts}
        verls |= {"success_threshold": self.success_threshold, "buckets": buckets}
        settings = {name: value for name, value in verls.items() if name in known}
        if self.allocation_name in _WAVES:
            settings |= self._waves(num_rollouts, given)
        try:
            allocation: Allocation = allocation_class(**settings | given)
        except ConfigError as error:  # its messages begin with the core's name of the setting
            raise ConfigError(f"rollwise.allocation: {error}") from error
        return allocation

    def _waves(self, num_rollouts: int, given: Mapping[str, Any]) -> dict[str, int]:
        first, second = _WAVES[self.allocation_name]
        if second in given:
            raise ConfigError(
                f"rollwise.allocation.{second} is actor_rollout_ref.rollout.n less {first}; set those two"
            )
        size = given.get(first, max(2, num_rollouts // 4))
        if not 1 <= size < num_rollouts:
            raise ConfigError(
                f"rollwise.allocation.{first} is {size} of actor_rollout_ref.rollout.n {num_rollouts}; it must be at "
                "least 1 and leave at least 1"
            )
        return {first: size, second: num_rollouts - size}

    def replay_settings(self) -> Replay:
        """The core's settings of replay.

        Raises:
            ConfigError: If one of them is unknown or out of its bounds.
        """
        given: dict[str, Any] = {"ratio": 0.0} if self.replay is None else dict(self.replay)
        known = [setting.name for setting in fields(Replay)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"rollwise.replay has {unknown}; it knows {known}")
        try:
            if isinstance(given.get("priority"), str):
                given["priority"] = named_priority(given["priority"])
            return Replay(**given)
        except ConfigError as error:  # its messages begin with the core's name of the setting
            raise ConfigError(f"rollwise.replay.{error}") from error


def settings_of(config: Any) -> RollwiseSettings:
    """The `rollwise:` block of verl's configuration.

    Raises:
        ConfigError: If it has a setting that there is none of, or one is out of its bounds.
    """
    from omegaconf import OmegaConf

    block = OmegaConf.select(config, "rollwise")
    return RollwiseSettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))
