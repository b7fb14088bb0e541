"""Episodes of several turns: one row each, exact gradients, counted once, replayed whole."""

import pytest
import torch
from trl import GRPOTrainer

from rollwise import ConfigError
from rollwise.trl import RollwiseGRPOTrainer

pytest.importorskip("gymnasium", reason="environments need gymnasium")

import tiny_episodes
from tiny_episodes import EpisodeReference

from rollwise.trl.episodes import EpisodeRollouts

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")  # of the stock trainer

REPLAY = {"replay_ratio": 1.0}
PILOT_COMMIT = {"allocation": "pilot_commit", "pilot_rollouts": 3, "p_lower": 0.05, "success_threshold": 0.5}


def check(tmp_path, **settings):
    reference = EpisodeReference()
    trainer = tiny_episodes.trainer(tmp_path, callbacks=[reference], **({"max_steps": 4} | settings))
    reference.watch(trainer).train()
    assert len(reference.errors) == trainer.args.max_steps
    assert max(reference.errors) < 1e-5
    assert reference.shown > 0
    return reference


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_gradient_of_replayed_episodes_is_the_references(tmp_path, loss):
    reference = check(tmp_path, loss_type=loss, gradient_accumulation_steps=2, drop_zero_variance=False, **REPLAY)
    assert {"uniform", "replay"} == set(reference.sources)
    assert len({len(reference.answers(row)) for row in reference.rows.values()}) > 2  # of many lengths


@pytest.mark.parametrize(
    "settings", [PILOT_COMMIT, {"allocation": "belief", "pilot_rollouts": 3, "success_threshold": 0.5}]
)
def test_allocations_work_on_episodes(tmp_path, settings):
    reference = check(tmp_path, max_steps=6, per_device_train_batch_size=32, num_iterations=2, **REPLAY, **settings)
    assert {"pilot", "commit", "replay"} <= set(reference.sources)


class StockTrainer(GRPOTrainer):
    """TRL's own, which says what data its prompts come from and nothing else."""

    def _generate_and_score_completions(self, inputs):
        self.rollout_examples = inputs
        return super()._generate_and_score_completions(inputs)

    @property
    def _text_tokenizer(self):
        return self.processing_class


def test_off_means_off(tmp_path):
    runs = []
    for trainer_class in (StockTrainer, RollwiseGRPOTrainer):
        trainer = tiny_episodes.trainer(tmp_path, trainer_class=trainer_class, max_steps=3, num_iterations=2)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, [parameter.tolist() for parameter in trainer.model.parameters()]))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == 3


def test_an_episode_is_one_rollout_and_its_shown_tokens_are_not_generated_ones(tmp_path):
    lengths = []

    class Watching(EpisodeRollouts):
        def __call__(self, prompts, trainer):
            output = super().__call__(prompts, trainer)
            lengths.extend(sum(len(answer) for answer in episode.answers) for episode in self.episodes)
            return output

    rollouts = Watching("frozen_lake", **tiny_episodes.SETTINGS)
    trainer = tiny_episodes.trainer(tmp_path, rollouts=rollouts, max_steps=5, **REPLAY)
    trainer.train()
    totals = trainer.ledger.totals()
    assert totals["rollouts_generated"] == len(lengths) == 5 * 16
    assert totals["tokens_generated"] == sum(lengths)
    assert totals["rows_replayed"] > 0
    assert len(trainer.scheduler.buffer) <= totals["rollouts_trained"]
    stored = trainer.scheduler.buffer.rollouts
    assert max(sum(rollout.payload["tool_mask"] == 0) for rollout in stored) > 0  # whole episodes, not turns
    assert all(rollout.loss_tokens == rollout.payload["tool_mask"].sum() for rollout in stored)


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    def slippery():
        return EpisodeRollouts("frozen_lake", slippery=True, **tiny_episodes.SETTINGS)

    settings = REPLAY | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = tiny_episodes.trainer(tmp_path, rollouts=slippery(), **settings)
    whole.train()
    resumed = tiny_episodes.trainer(tmp_path, rollouts=slippery(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.ledger.records() == whole.ledger.records()


def test_episodes_of_a_broken_environment_are_unscored_and_reach_no_advantage(tmp_path):
    rollouts = EpisodeRollouts("tiny_episodes:BreakingLake", **tiny_episodes.SETTINGS)
    trainer = tiny_episodes.trainer(tmp_path, rollouts=rollouts, max_steps=3, **REPLAY)
    told = []
    tell = trainer.scheduler.tell
    trainer.scheduler.tell = lambda rollouts: told.extend(rollouts) or tell(rollouts)
    trainer.train()
    unscored = [rollout for rollout in told if not rollout.is_scored]
    assert 0 < len(unscored) < len(told) == 48
    assert trainer.ledger.by_outcome()["unscored"] == len(unscored)
    assert all(rollout.advantage != rollout.advantage for rollout in unscored)
    assert all(rollout.is_scored for rollout in trainer.scheduler.buffer.rollouts)
    never_begun = [rollout for rollout in told if not rollout.num_tokens]
    assert 0 < len(never_begun) < len(unscored)
    assert not any(rollout.is_scored or rollout.loss_tokens for rollout in never_begun)


def test_an_episode_that_has_no_room_for_another_answer_ends_with_what_it_has(tmp_path):
    rollouts = EpisodeRollouts("frozen_lake", max_episode_tokens=24, **tiny_episodes.SETTINGS)
    trainer = tiny_episodes.trainer(tmp_path, rollouts=rollouts, max_steps=2, **REPLAY)
    trainer.train()
    cut = [episode for episode in rollouts.episodes if episode.ended_by == "max_episode_tokens"]
    assert cut
    for episode in rollouts.episodes:
        assert len(episode.context.ids) <= 24
        assert episode.reward == pytest.approx(sum(episode.rewards))
    rollouts = EpisodeRollouts("frozen_lake", max_episode_tokens=8, **tiny_episodes.SETTINGS)
    trainer = tiny_episodes.trainer(tmp_path, rollouts=rollouts, train_dataset=tiny_episodes.dataset(["SF/FG"] * 8))
    with pytest.raises(ConfigError, match="prompt of 7 tokens leaves no room .* within 8 tokens"):
        trainer.train()


def test_evaluations_meet_the_same_chance_every_time(tmp_path):
    seeds = []

    class Watching(EpisodeRollouts):
        def _seeds(self, num_episodes, trainer):
            seeds.append((trainer.model.training, super()._seeds(num_episodes, trainer)))
            return seeds[-1][1]

    tiny_episodes.trainer(
        tmp_path,
        rollouts=Watching("frozen_lake", slippery=True, **tiny_episodes.SETTINGS),
        eval_dataset=tiny_episodes.dataset(["SF/FG", "SH/FG"]),
        num_generations_eval=4,
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
    ).train()
    evaluated = [found for is_training, found in seeds if not is_training]
    trained = [found for is_training, found in seeds if is_training]
    assert len(evaluated) == 2
    assert evaluated[0] == evaluated[1]
    assert len({seed for found in trained for seed in found}) == 32


def test_what_is_not_made_for_episodes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="GRPOTrainer, which does not say what data"):
        tiny_episodes.trainer(tmp_path, trainer_class=GRPOTrainer).train()
    without = tiny_episodes.dataset().remove_columns("spec")
    with pytest.raises(ConfigError, match="no 'spec'; make it with"):
        tiny_episodes.trainer(tmp_path, train_dataset=without).train()
    with pytest.raises(ConfigError, match="no setting 'sliperry'"):
        EpisodeRollouts("frozen_lake", sliperry=True)
    with pytest.raises(ConfigError, match="max_episode_tokens is 1"):
        EpisodeRollouts("frozen_lake", max_episode_tokens=1)
