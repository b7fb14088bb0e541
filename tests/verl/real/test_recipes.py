"""Every recipe composes with hydra and passes verl's and Rollwise's checks, up to where weights are downloaded."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import open_dict

from rollwise import PilotCommit
from rollwise.verl.main import check
from rollwise.verl.settings import settings_of

RECIPES = Path(__file__).parents[3] / "examples" / "verl"
NAMES = sorted(path.stem for path in RECIPES.glob("[!_]*.yaml"))


def composed(name, *overrides):
    """As the command line does with `--config-dir`: there a recipe is looked for, and here beside it."""
    searchpath = "hydra.searchpath=[pkg://rollwise.verl.config,pkg://verl.trainer.config]"
    if name in NAMES:
        with initialize_config_dir(str(RECIPES), version_base=None):
            return compose(name, overrides=[searchpath, *overrides])
    with initialize_config_module("rollwise.verl.config", version_base=None):
        return compose(name, overrides=[searchpath, *overrides])


def test_there_are_recipes():
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_composes_and_is_accepted(name):
    config = composed(name)
    check(config)
    settings = settings_of(config)
    assert settings.is_active
    assert config.trainer.experiment_name == name
    rollouts = config.actor_rollout_ref.rollout.n
    allocation = settings.allocation_settings(config.data.train_batch_size, rollouts)
    if "pilot_commit" in name:
        assert isinstance(allocation, PilotCommit)
        assert (allocation.train_prompts, allocation.prompts_per_round) == (128, 384)
        assert (allocation.pilot_rollouts, allocation.commit_rollouts) in ((32, 96), (16, 48))
    else:
        assert settings.replay_settings().is_on
    assert (RECIPES.parents[1] / config.reward.custom_reward_function.path).is_file()


def test_without_a_recipe_the_configuration_is_verls_and_a_block_with_nothing_on():
    config = composed("rollwise_ppo_trainer")
    with open_dict(config):
        block = config.pop("rollwise")
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert config == compose("ppo_trainer")
    assert block.replay.ratio == 0.0
    assert block.allocation.name == "uniform"


def test_the_block_can_be_overridden_without_a_plus_sign_except_for_an_allocations_own_settings():
    config = composed(
        "rollwise_ppo_trainer",
        "rollwise.replay.ratio=0.25",
        "rollwise.allocation.name=belief",
        "+rollwise.allocation.half_life_steps=7",
    )
    settings = settings_of(config)
    assert settings.replay_settings().ratio == 0.25
    assert settings.allocation_settings(4, 8).half_life_steps == 7


def test_verl_takes_the_search_tool_from_its_file(monkeypatch):
    from verl.tools.function_tool import load_function_tools_from_path

    monkeypatch.setenv("ROLLWISE_SEARCH_URL", "http://localhost:1/")
    (tool,) = load_function_tools_from_path(str(RECIPES / "search_tool.py"))
    assert tool.tool_schema.function.name == "search"
    assert set(tool.tool_schema.function.parameters.properties) == {"query"}
