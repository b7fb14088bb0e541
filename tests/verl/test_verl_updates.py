"""How many optimizer steps a batch is cut into, and what it is padded to. Needs neither verl nor Ray."""

import pytest

from rollwise.verl.updates import batch_multiple, mini_batches_of, num_updates


class Config(dict):
    """A configuration whose entries are attributes too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def config(prompts=8, mini=4, micro=2, log_prob_micro=3, dynamic=False, critic=None):
    actor = Config(ppo_mini_batch_size=mini, ppo_micro_batch_size_per_gpu=micro, use_dynamic_bsz=dynamic)
    rollout = Config(n=16, log_prob_micro_batch_size_per_gpu=log_prob_micro)
    return Config(
        data=Config(train_batch_size=prompts),
        actor_rollout_ref=Config(actor=actor, rollout=rollout),
        algorithm=Config(adv_estimator="grpo" if critic is None else "gae"),
        critic=critic,
    )


@pytest.mark.parametrize(("prompts", "mini", "expected"), [(8, 8, 1), (8, 4, 2), (8, 2, 4), (4, 8, 1)])
def test_a_batch_has_as_many_updates_as_verls_own(prompts, mini, expected):
    made = config(prompts, mini)
    assert num_updates(made, made.actor_rollout_ref.actor) == expected


def test_every_process_and_update_gets_whole_micro_batches():
    assert batch_multiple(config(), dp_size=3) == 3 * 2 * 6
    assert batch_multiple(config(dynamic=True), dp_size=3) == 3 * 2


def test_a_critic_gets_whole_ones_too():
    critic = Config(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=5, use_dynamic_bsz=False)
    multiple = batch_multiple(config(critic=critic), dp_size=2)
    assert multiple % (2 * 2 * 6) == multiple % (2 * 4 * 5) == 0
    assert multiple == 120


def test_the_settings_are_verls_again_afterwards_even_after_an_error():
    made = config()
    actor, rollout = made.actor_rollout_ref.actor, made.actor_rollout_ref.rollout

    def fails():
        with mini_batches_of(made, actor, num_rows=36):
            # verl cuts into mini-batches of ppo_mini_batch_size * n rows.
            assert actor.ppo_mini_batch_size * rollout.n == 18
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (actor.ppo_mini_batch_size, rollout.n) == (4, 16)
