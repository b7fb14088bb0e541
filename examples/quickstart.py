"""TRL's GRPO with Rollwise, as a script: what changes is marked with `rollwise`.

    python examples/quickstart.py

Trains the embedded arithmetic model for a minute on a CPU; nothing is downloaded.
"""

import torch

from rollwise.tasks import arithmetic  # a small model, problems and a reward, to have something to train
from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer  # rollwise: instead of trl's GRPOConfig, GRPOTrainer

torch.set_num_threads(1)  # the model is too small for more to help

problems = arithmetic.load_dataset(num_train=8_000, num_test=256)

config = RollwiseGRPOConfig(  # rollwise: instead of GRPOConfig, and with these four fields
    allocation="pilot_commit",  # rollwise: a few pilots per prompt; whole groups only where they disagree
    solved_prompts="next_epoch",  # rollwise: a prompt whose pilots all succeed comes back in the next epoch
    replay_ratio=1.0,  # rollwise: a row from earlier steps per fresh one, by the size of its advantage
    replay_warmup_steps=3,  # rollwise: from the fourth step on
    output_dir="runs/quickstart",
    max_steps=40,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    per_device_train_batch_size=256,
    num_generations=16,
    max_completion_length=arithmetic.MAX_COMPLETION_TOKENS,
    eval_strategy="steps",
    eval_steps=20,
    eval_on_start=True,
    num_generations_eval=2,
    per_device_eval_batch_size=512,
    save_strategy="no",
    use_cpu=True,  # on a GPU, leave out these four
    bf16=False,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
)

trainer = RollwiseGRPOTrainer(  # rollwise: instead of GRPOTrainer
    model=str(arithmetic.model_path()),
    reward_funcs=arithmetic.exact_match_reward,
    args=config,
    train_dataset=problems["train"],
    eval_dataset=problems["test"],
)
trainer.train()

print(f"held-out accuracy: {trainer.evaluate()['eval_rollwise/accuracy']:.3f}")
print(trainer.ledger.totals())  # rollwise: what became of every rollout
trainer.ledger.save("runs/quickstart/ledger.parquet")
