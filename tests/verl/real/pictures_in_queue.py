"""Rows with images through a real TransferQueue: in as verl's agent loop writes them, out as verl's engine reads them.

A program of its own, for it starts Ray.
"""

import sys

import ray
import torch
import transfer_queue as tq
import verl_on_cpu  # noqa: F401 - patience with Ray
from omegaconf import OmegaConf
from real import pictures
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollwise.tasks.agents import build_vision_agent
from rollwise.verl import queue
from rollwise.verl.rows import Place


def row_of(model, text, length):
    prompt, media = pictures.prompt_of(text)
    response = torch.arange(20, 20 + length)
    return {
        "prompts": torch.tensor(prompt),
        "responses": response,
        "response_mask": torch.ones(length, dtype=torch.int64),
        "rollout_log_probs": torch.randn(length),
        "rm_scores": torch.nn.functional.pad(torch.ones(1), (length - 1, 0)),
        "num_turns": 2,
        "multi_modal_inputs": media,
        "position_ids": pictures.positions(model, prompt + response.tolist(), media),
    }


def main():
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    model = build_vision_agent()
    rows = [row_of(model, f"{i} + {i}", length=2 + i % 3) for i in range(8)]
    counts = {len(row["multi_modal_inputs"].get("image_grid_thw", ())) for row in rows}
    assert counts == {0, 1, 2}, counts
    keys = [f"u{i}_0_0" for i in range(len(rows))]
    for key, row in zip(keys, rows, strict=True):
        tq.kv_batch_put(keys=[key], fields=list_of_dict_to_tensordict([row]), tags=[{}], partition_id="train")

    rollouts = queue.read([[key] for key in keys])
    places = [Place(f"v{i}", 0, 0, 0, 1.0) for i in range(len(rows))]
    keys, _ = queue.write(rollouts, places)

    names = ["multi_modal_inputs", "position_ids", "input_ids"]
    data = tq.kv_batch_get(keys=keys, partition_id=queue.TRAINED, select_fields=names)
    for row, positions in zip(rows, data["position_ids"].unbind(0), strict=True):
        assert torch.equal(positions, row["position_ids"])
    media = extract_multi_modal_inputs(data["multi_modal_inputs"])
    for name in ("pixel_values", "image_grid_thw"):
        expected = [row["multi_modal_inputs"][name] for row in rows if name in row["multi_modal_inputs"]]
        assert torch.equal(media[name], torch.cat(expected))
    sys.stdout.write("the images are as they were\n")


if __name__ == "__main__":
    main()
