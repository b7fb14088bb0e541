"""Settings: none is dead, every one has help, the supported versions are checked."""

import dataclasses
import re
from importlib import metadata
from pathlib import Path

import priorities_for_tests
import pytest
import tiny
from trl import GRPOConfig, TrlParser

import rollwise.trl
from rollwise import ConfigError, PilotCommit, Replay, VersionError
from rollwise.trl import RollwiseGRPOConfig

OWN_FIELDS = {
    name
    for name in set(RollwiseGRPOConfig.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__)
    if not name.startswith("_")
}
SOURCE = Path(rollwise.trl.__file__).parents[1]


@pytest.mark.parametrize("name", sorted(OWN_FIELDS))
def test_every_field_is_read_and_has_help(name):
    text = "".join(file.read_text() for file in (SOURCE / "trl").glob("*.py"))
    assert re.search(rf"(self|args)\.{name}\b", text)
    assert len(RollwiseGRPOConfig.__dataclass_fields__[name].metadata["help"]) > 20


@pytest.mark.parametrize(
    ("settings", "files"),
    [(PilotCommit, ["allocation/pilot_commit.py"]), (Replay, ["replay/buffer.py", "replay/composition.py"])],
)
def test_every_setting_of_the_core_is_read(settings, files):
    text = "".join((SOURCE / file).read_text() for file in [*files, "scheduler.py"])
    for setting in dataclasses.fields(settings):
        # `beta(step)` is made of per_beta_steps and nothing else reads it
        name = "beta" if setting.name == "per_beta_steps" else setting.name
        assert re.search(rf"settings\.{name}\b|self\.{name}\b", text), setting.name


def test_every_setting_of_the_core_can_be_set_through_the_config(tmp_path):
    allocation = {
        "pilot_rollouts": 3,
        "pilot_prompts": 7,
        "p_lower": 0.2,
        "p_upper": 0.6,
        "p_solve": 0.9,
        "success_threshold": 0.5,
        "easy_prompts": "remove",
        "solved_prompts": "remove",
        "max_survivor_age_steps": 2,
        "bind_pilots": False,
        "pilot_every_step": False,
        "survivor_selection": "most_recent",
        "max_pilot_rounds": 3,
    }
    config = tiny.config(tmp_path, allocation="pilot_commit", **allocation)
    further = {"retire_rollouts": 9, "recheck_share": 0.1, "downsample_pilots": 2}
    config.allocation_kwargs = further
    assert config.allocation_settings() == PilotCommit(train_prompts=2, commit_rollouts=5, **allocation, **further)
    replay = {
        "ratio": 0.7,
        "alpha": 0.9,
        "epsilon": 0.1,
        "composition": "pool",
        "unit": "group",
        "priority": "reward",
        "newcomers": "max",
        "max_uses": 4,
        "max_age_steps": 3,
        "max_age_versions": 6,
        "max_age_kl": 0.3,
        "decay_tau_steps": 5.0,
        "decay_tau_versions": 7.0,
        "decay_tau_kl": 0.2,
        "per_beta": 0.4,
        "per_beta_steps": 9,
        "updates_per_fresh": 2,
        "warmup_steps": 2,
        "capacity_rollouts": 10,
        "capacity_bytes": 1000,
    }
    config = tiny.config(tmp_path, **{f"replay_{name}": value for name, value in replay.items()})
    assert config.replay_settings() == Replay(**replay)
    assert set(replay) == {setting.name for setting in dataclasses.fields(Replay)}
    assert {*allocation, *further, "train_prompts", "commit_rollouts"} == {
        setting.name for setting in dataclasses.fields(PilotCommit)
    }


def test_a_priority_of_ones_own_by_its_dotted_path(tmp_path):
    config = tiny.config(tmp_path, replay_priority="priorities_for_tests.shortest_first")
    assert config.replay_settings().priority is priorities_for_tests.shortest_first
    for name in ("no_such_module.priority", "priorities_for_tests.nothing"):
        with pytest.raises(ConfigError, match=f"replay_priority is '{name}', and there is no such function"):
            tiny.config(tmp_path, replay_priority=name)
    with pytest.raises(ConfigError, match="priority is 'biggest'; it must be one of"):
        tiny.config(tmp_path, replay_priority="biggest")


def test_fields_are_flags_of_trls_parser(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--allocation", "pilot_commit"]
    flags += ["--replay_max_age_steps", "4", "--num_generations", "4"]
    (config,) = TrlParser([RollwiseGRPOConfig]).parse_args_and_config(flags)
    assert config.allocation == "pilot_commit"
    assert config.replay_max_age_steps == 4
    assert config.is_active


def test_zero_variance_rows_leave_the_normaliser_with_the_methods_only(tmp_path):
    assert not tiny.config(tmp_path).drops_zero_variance
    assert tiny.config(tmp_path, replay_ratio=0.5).drops_zero_variance
    assert tiny.config(tmp_path, allocation="pilot_commit").drops_zero_variance
    assert not tiny.config(tmp_path, replay_ratio=0.5, drop_zero_variance=False).drops_zero_variance


@pytest.mark.parametrize("version", ["0.29.1", "1.17.0", "2.0"])
def test_other_releases_of_trl_are_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(
        VersionError, match=rf"from 1\.0 to below 1\.17, found {version}.*pip install 'trl>=1\.0,<1\.17'"
    ):
        rollwise.trl._check_trl_version()


@pytest.mark.parametrize("version", ["1.0.0", "1.16.0", "1.16.0.dev0"])
def test_supported_releases_of_trl_pass(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    rollwise.trl._check_trl_version()


def test_missing_trl_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(VersionError, match="needs TRL, which is not installed; install"):
        rollwise.trl._check_trl_version()
