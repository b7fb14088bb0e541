"""A tiny model, tokenizer, data set and reward for tests that drive the real trainer."""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer

PAD, EOS = 0, 1
# The newer name, where transformers has it; the older one is deprecated there.
_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in RollwiseGRPOConfig.__dataclass_fields__
    else "gradient_checkpointing"
)


def tokenizer():
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+=ab "])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(seed=0, hidden=32, layers=2):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=17,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )


def dataset(num_prompts=48, seed=0):
    """Prompts of several lengths, so that padding is exercised."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        a, b = rng.randrange(5), rng.randrange(5)
        rows.append({"prompt": "0" * rng.randrange(3) + f"{a}+{b}=", "answer": str(a + b)})
    return Dataset.from_list(rows)


def contains_answer(completions, answer, **kwargs):
    """Right if the answer's digit is among the first three characters: about 1 in 6 for a random model."""
    return [float(right in completion[:3]) for right, completion in zip(answer, completions, strict=True)]


def config(output_dir, **settings):
    defaults = dict(
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=6,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        **{_CHECKPOINTING: False},
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        replay_warmup_steps=1,
        solved_prompts="next_epoch",
    )
    return RollwiseGRPOConfig(output_dir=str(output_dir), **(defaults | settings))


def trainer(
    output_dir,
    *,
    trainer_class=RollwiseGRPOTrainer,
    callbacks=None,
    train_dataset=None,
    eval_dataset=None,
    from_folder=False,
    policy=None,
    **settings,
):
    policy = model() if policy is None else policy
    if from_folder:  # TRL loads the reference model for a KL term from where the policy came from
        policy.save_pretrained(f"{output_dir}/policy")
        policy = LlamaForCausalLM.from_pretrained(f"{output_dir}/policy")
    made = trainer_class(
        model=policy,
        reward_funcs=contains_answer,
        args=config(output_dir, **settings),
        train_dataset=dataset() if train_dataset is None else train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    made.remove_callback(PrinterCallback)
    return made
