"""`python -m rollwise.verl.main` in place of `python -m verl.trainer.main_ppo`; takes the same overrides.

The configuration is verl's `ppo_trainer` with a `rollwise:` block. Everything is verl's but for the trainer class.
"""

from __future__ import annotations

import rollwise.verl.version_check  # noqa: F401 - before anything of verl's

# isort: split

from typing import Any

import hydra
import ray
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from rollwise.errors import RollwiseError


@ray.remote
class RollwiseTaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner; its synchronous trainer is Rollwise's."""

    def run(self, config: Any) -> None:
        """Run the training to its end."""
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from rollwise.verl.trainer import RollwiseTrainer

        # Under a name of its own verl would take it for an asynchronous one.
        TRAINER_REGISTRY["sync"] = RollwiseTrainer
        super().run(config)


def check(config: Any) -> None:
    """Refuse a configuration that cannot be run as it says, before Ray starts.

    Raises:
        RollwiseError: If the `rollwise:` block does not go with the rest.
    """
    from rollwise.verl.checks import check_config
    from rollwise.verl.settings import settings_of

    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    check_config(config, settings_of(config))


@hydra.main(config_path="pkg://rollwise.verl.config", config_name="rollwise_ppo_trainer", version_base=None)
def main(config: Any) -> None:
    """Train as the configuration says."""
    auto_set_device(config)
    try:
        check(config)
        run_ppo(config, task_runner_class=RollwiseTaskRunner)
    except RollwiseError as error:  # raised in the runner, it comes with verl's traceback as its cause
        cause = getattr(error, "cause", None) or error
        raise SystemExit(f"rollwise: {cause}") from None


if __name__ == "__main__":
    main()
