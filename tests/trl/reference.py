"""A slow reference for the trainer's gradient: one unpadded row at a time, nothing shared with the library.

It watches a real `trainer.train()`. For every update it takes which rollouts the scheduler put into the batch,
and computes the rest itself: rewards from the decoded text, advantages from those, the behaviour policy's
log-probs from a copy of the weights at the rollout's birth, and the loss from its formula.
"""

import math

import tiny
import torch
from accelerate.utils import gather_object
from tiny import contains_answer
from transformers import TrainerCallback


class GradientReference(TrainerCallback):
    """Compares the gradient of every update with the reference; collects the relative errors."""

    def __init__(self, epsilon_low=0.2, epsilon_high=0.2):
        self.trainer = None
        self.epsilon_low, self.epsilon_high = epsilon_low, epsilon_high
        self.policies = {}  # step -> the weights that generated in it
        self.groups = {}  # id of a rollout -> the rollout, and its group's rewards
        self.rows = {}  # id of a rollout -> its row, wherever it is held
        self.batch = None
        self.errors, self.sources, self.ages, self.weights = [], [], [], []
        self.clipped, self.cut = 0, 0  # tokens that the clip cut off; tokens or rows that another correction did

    def watch(self, trainer):
        self.trainer = trainer
        ask, batch, take = trainer.scheduler.ask, trainer.scheduler.batch, trainer.scheduler.allocator.take

        def recording_ask(step=None, prompts=None):
            self.taken = []  # a replay-only step takes no groups
            if step is not None and step not in self.policies:
                # A model of its own: TRL patches the forward of the one it trains, a copy of it would share it.
                policy = self.new_policy()
                policy.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
                self.policies[step] = policy
            return ask(step, prompts)

        def recording_take(step):
            groups = take(step)
            self.collect_rows([rollout for group in groups for rollout in group.rollouts])
            for group in groups:
                rewards = [self.reward(rollout) for rollout in group.rollouts]
                for rollout in group.rollouts:
                    self.groups[id(rollout)] = (rollout, rewards)  # kept alive: ids stay unique
            self.taken = [rollout for group in groups for rollout in group.rollouts]
            return groups

        def recording_batch():
            self.batch = batch()
            return self.batch

        trainer.scheduler.ask, trainer.scheduler.batch = recording_ask, recording_batch
        trainer.scheduler.allocator.take = recording_take
        return trainer

    def new_policy(self):
        return tiny.model().eval()

    def num_tokens(self, row):
        return len(row["completion_ids"])

    def collect_rows(self, rollouts):
        rank = self.trainer.accelerator.process_index
        held = gather_object([(i, r.payload) for i, r in enumerate(rollouts) if r.owner == rank])
        assert sorted(i for i, _ in held) == list(range(len(rollouts)))  # each row is held exactly once
        self.rows |= {id(rollouts[i]): row for i, row in held}

    def reward(self, rollout):
        row, example = self.rows[id(rollout)], self.trainer.train_dataset[rollout.prompt_id]
        prompt = self.trainer.processing_class.decode(row["prompt_ids"])
        assert prompt == example["prompt"]
        text = self.trainer.processing_class.decode(row["completion_ids"], skip_special_tokens=True)
        return contains_answer([text], [example["answer"]])[0]

    def advantage(self, rollout):
        _, rewards = self.groups[id(rollout)]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        scale = 1.0 if self.trainer.scale_rewards == "none" else deviation + 1e-4
        return (self.reward(rollout) - mean) / scale

    @staticmethod
    def logps(model, row):
        prompt = torch.tensor(row["prompt_ids"].tolist())
        completion = torch.tensor(row["completion_ids"].tolist())
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]

    def sampling_ratio(self, row):
        """What TRL multiplies a row's tokens by where something else than the policy sampled them."""
        return 1.0

    def loss(self, model):
        args = self.trainer.args
        per_row = []
        for row in self.batch.rows:
            payload, advantage = self.rows[id(row.rollout)], self.advantage(row.rollout)
            new = self.logps(model, payload)
            with torch.no_grad():
                old = self.logps(self.policies[row.rollout.birth_step], payload)
            ratio = (new - old).exp()
            if args.importance_sampling_level == "sequence":
                ratio = (new - old).mean().exp().expand(len(new))
            if row.source == "replay" and args.replay_correction in ("truncated", "none"):
                cap = args.replay_truncation_cap
                weights = ratio.detach().clamp(max=cap) if args.replay_correction == "truncated" else 1.0
                self.cut += int((ratio > cap).sum())
                if args.importance_sampling_level == "sequence":  # the gradient of the ratio at 1, not of each token
                    tokens = -weights * advantage * new.mean().expand(len(new))
                else:
                    tokens = -weights * advantage * new
            elif args.loss_type == "cispo":
                tokens = -ratio.clamp(max=self.epsilon_high).detach() * advantage * new
            elif args.loss_type == "sapo":
                temperature = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
                tokens = -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
            else:
                bounded = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
                tokens = -torch.minimum(ratio * advantage, bounded * advantage)
                self.clipped += int((bounded * advantage < ratio * advantage).sum())
            mean_ratio = (new - old).mean().exp().item()
            bound = args.replay_mask_bound
            is_outside = mean_ratio > bound or mean_ratio < 1 / bound
            if row.source == "replay" and args.replay_correction == "sequence_mask" and is_outside:
                tokens = tokens * 0.0
                self.cut += 1
            per_row.append(tokens * self.sampling_ratio(payload) * row.weight)
        rest = [r for r in self.taken if len(set(self.groups[id(r)][1])) == 1] if not args.drops_zero_variance else []
        num_rows = len(per_row) + len(rest)
        num_tokens = sum(map(len, per_row)) + sum(self.num_tokens(self.rows[id(r)]) for r in rest)
        if args.loss_type in ("grpo", "sapo"):
            return sum(tokens.mean() for tokens in per_row) / num_rows
        if args.loss_type == "dr_grpo":
            return sum(tokens.sum() for tokens in per_row) / (num_rows * args.max_completion_length)
        return sum(tokens.sum() for tokens in per_row) / num_tokens

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.batch.rows:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        actual = torch.cat([p.grad.flatten() for p in parameters])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(model), parameters)])
        self.errors.append(((actual - expected).norm() / expected.norm()).item())
        self.sources += [row.source for row in self.batch.rows]
        self.ages += [row.age_steps for row in self.batch.rows]
        self.weights += [row.weight for row in self.batch.rows]
