"""The slow reference for prompts with images; needs Pillow."""

import numpy as np
import tiny_vision
import torch
from reference import GradientReference


class VisionReference(GradientReference):
    """The reference for prompts with images: each is processed anew, alone, from the data set."""

    def __init__(self, family):
        super().__init__()
        self.family = family
        self.inputs = {}  # id of a row -> the model's inputs for its prompt
        self.images_per_micro_batch = []

    def watch(self, trainer):
        super().watch(trainer)
        compute_logps = trainer._get_per_token_logps_and_entropies

        def recording_logps(*args, **kwargs):
            if torch.is_grad_enabled():
                self.images_per_micro_batch.append(sum(kwargs.get("num_images") or [0]))
            return compute_logps(*args, **kwargs)

        trainer._get_per_token_logps_and_entropies = recording_logps
        return trainer

    def new_policy(self):
        return tiny_vision.model(self.family).eval()

    def process(self, example):
        content = [{"type": "image", "image": image} for image in example["images"]]
        content += [{"type": "text", "text": message["content"]} for message in example["prompt"]]
        return self.trainer.processing_class.apply_chat_template(
            [[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )

    def reward(self, rollout):
        row, example = self.rows[id(rollout)], self.trainer.train_dataset[rollout.prompt_id]
        if id(row) not in self.inputs:
            self.inputs[id(row)] = dict(self.process(example))
            check_images(row, self.inputs[id(row)])
        text = self.trainer._text_tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        return tiny_vision.names_the_colour([[{"content": text}]], [example["answer"]])[0]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # Where no row of the batch has an image, the vision tower has no gradient.
        unused = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        for parameter in unused:
            parameter.requires_grad_(False)
        super().on_pre_optimizer_step(args, state, control, model=model, **kwargs)
        for parameter in unused:
            parameter.requires_grad_(True)

    def logps(self, model, row):
        inputs = dict(self.inputs[id(row)])
        completion = torch.tensor(row["completion_ids"].tolist())
        length = inputs["input_ids"].shape[1]
        for key in {"token_type_ids", "mm_token_type_ids"} & set(inputs):
            inputs[key] = torch.nn.functional.pad(inputs[key], (0, len(completion)))
        inputs["input_ids"] = torch.cat([inputs["input_ids"], completion[None]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        logits = model(**inputs).logits[0, length - 1 : -1]
        return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def check_images(row, inputs):
    """What is stored with a row is, bit for bit, what the processor makes of its prompt alone."""
    assert row["prompt_ids"].tolist() == inputs["input_ids"][0].tolist()
    for key in set(inputs) - {"input_ids", "attention_mask"}:
        if key not in row:  # of a batch without any image
            assert "pixel_values" not in inputs
            continue
        stored = row[key]
        if key + ".shape" in row:
            shape = row[key + ".shape"]
            stored = np.pad(stored, (0, shape.prod() - len(stored))).reshape(shape)
            stored = stored[tuple(slice(size) for size in inputs[key].shape)]  # a batch may have padded it
        expected = inputs[key].numpy()
        assert stored.astype(expected.dtype).tobytes() == expected.tobytes(), key
