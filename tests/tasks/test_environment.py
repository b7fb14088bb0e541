"""What every environment has in common: the limits, malformed answers, the two interfaces."""

import math
import subprocess
import sys
import time
from dataclasses import dataclass

import gymnasium
import pytest

from rollwise.errors import ConfigError, ProtocolError
from rollwise.tasks.environment import LanguageEnvironment, Observation, Outcome
from rollwise.tasks.frozen_lake import FrozenLake


@dataclass(kw_only=True, eq=False)
class Scripted(LanguageEnvironment):
    """Does what the answer says."""

    name = "scripted"

    @property
    def instructions(self):
        return "Say anything."

    def draw_spec(self, level, rng):
        raise ConfigError(f"no level {level!r}")

    def _begin(self, spec):
        return Observation("begin")

    def _play(self, answer):
        if answer == "raise":
            raise RuntimeError("broken")
        if answer == "slow":
            time.sleep(0.02)
        reward = {"none": None, "nan": math.nan, "inf": math.inf}.get(answer, 0.5)
        return Outcome(Observation("next"), reward, done=answer == "end")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("raise", "RuntimeError: broken"), ("slow", "timeout_seconds"), ("none", "None"), ("nan", "nan"), ("inf", "inf")],
)
def test_what_cannot_be_scored_ends_the_episode_unscored(answer, reason):
    environment = Scripted(timeout_seconds=0.01)
    environment.begin({}, 0)
    assert environment.take_turn("fine").reward == 0.5
    turn = environment.take_turn(answer)
    assert (turn.reward, turn.done) == (None, True)
    assert reason in turn.unscored
    assert turn.observation.text == "next"
    with pytest.raises(ProtocolError, match="reset"):
        environment.take_turn("fine")
    environment.begin({}, 0)
    assert environment.take_turn("fine").unscored is None
    _, reward, terminated, truncated, info = environment.step(answer)
    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    assert reason in info["unscored"]


def test_the_last_turn_is_truncated_and_keeps_its_reward():
    environment = Scripted(max_turns=2)
    environment.begin({}, 0)
    assert not environment.take_turn("fine").done
    turn = environment.take_turn("fine")
    assert (turn.reward, turn.truncated, turn.terminated, turn.unscored) == (0.5, True, False, None)
    environment.begin({}, 0)
    environment.take_turn("fine")
    turn = environment.take_turn("end")
    assert (turn.truncated, turn.terminated) == (False, True)


def test_an_environment_without_levels_needs_a_spec():
    with pytest.raises(ConfigError, match="spec"):
        Scripted().reset(seed=0)
    observation, info = Scripted().reset(options={"spec": {"a": 1}})
    assert observation == {"text": "begin"}
    assert info == {"spec": {"a": 1}}


def test_a_malformed_answer_costs_a_turn_and_the_penalty_and_nothing_else():
    lake = FrozenLake(malformed_reward=-0.25, max_turns=3)
    before = lake.begin({"map": "SFG"}, 0).text
    for _ in range(2):  # the explanation does not pile up
        turn = lake.take_turn("I do not know")
        assert (turn.reward, turn.is_malformed, turn.done) == (-0.25, True, False)
        assert turn.observation.text == f"Not understood. Answer with one of left, down, right, up.\n{before}"
    turn = lake.take_turn("right")
    assert (turn.observation.text, turn.truncated, turn.is_malformed) == ("FPG", True, False)
    silent = FrozenLake(explain_malformed=False)
    assert silent.begin({"map": "SFG"}, 0) == silent.take_turn("?").observation


@pytest.mark.parametrize(
    "settings",
    [{"max_turns": 0}, {"timeout_seconds": 0}, {"malformed_reward": math.nan}, {"render_mode": "human"}],
)
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FrozenLake(**settings)


def test_pictures_where_there_are_none_are_refused():
    with pytest.raises(ConfigError, match="no pictures"):
        Scripted(picture=True)
    with pytest.raises(ConfigError, match="render_mode"):
        Scripted(render_mode="rgb_array")


def test_rendering():
    lake = FrozenLake(render_mode="ansi")
    lake.begin({"map": "SFG"}, 0)
    assert lake.render() == "PFG"
    lake = FrozenLake(render_mode="rgb_array")
    lake.begin({"map": "SFG"}, 0)
    assert lake.render().shape == (64, 64, 3)
    assert FrozenLake().render() is None


def test_reset_without_a_spec_draws_one_from_the_seed():
    assert FrozenLake().reset(seed=5)[1] == FrozenLake().reset(seed=5)[1]
    assert FrozenLake().reset(seed=5)[1] != FrozenLake().reset(seed=6)[1]


def test_gymnasium_s_vectors_and_wrappers_take_it():
    vector = gymnasium.vector.SyncVectorEnv([lambda: FrozenLake(picture=True, max_turns=2)] * 3)
    observations, _ = vector.reset(seed=1)
    assert observations["image"].shape == (3, 64, 64, 3)
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics(FrozenLake(malformed_reward=-0.5, max_turns=1))
    wrapped.reset(seed=1)
    *_, truncated, info = wrapped.step("nonsense")
    assert truncated
    assert info["episode"]["r"] == -0.5
    vector.close()


def test_what_is_not_installed_is_named():
    for package, module in (("gymnasium", "rollwise.tasks.environment"), ("bm25s", "rollwise.tasks.search")):
        code = f"""
import sys
sys.modules["{package}"] = None
import {module}
{module}.Corpus("corpus.jsonl")
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "VersionError" in result.stderr
        assert f"{package}: pip install 'rollwise[envs]'" in result.stderr
