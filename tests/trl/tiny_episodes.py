"""Tiny agents on tiny lakes, for tests of episodes that drive the real trainer; and the slow reference for them."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import tiny
import torch
from reference import GradientReference
from transformers import PrinterCallback

from rollwise.tasks import agents
from rollwise.tasks.actions import numbered, parse_action
from rollwise.tasks.conversation import TurnEncoder
from rollwise.tasks.frozen_lake import FrozenLake
from rollwise.tasks.imitation import demonstrate, imitate
from rollwise.tasks.levels import dataset_of, make_environment
from rollwise.trl import RollwiseGRPOTrainer
from rollwise.trl.episodes import EpisodeRollouts, episode_reward

SETTINGS = {"explain_malformed": False, "max_turns": 4, "malformed_reward": -0.25}
MAPS = ["SF/FG", "SH/FG", "SF/HG", "SG/FF", "SF/GF", "SFG/HFF", "SHF/FFG", "SGF/FHF"]
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


@lru_cache
def weights(picture):
    """Of an agent that has seen some demonstrations: moves are likely, but not all its answers are moves."""
    made = new_model(picture)
    processor = agents.build_processor() if picture else agents.build_tokenizer()
    environment = make_environment("frozen_lake", picture=picture, **SETTINGS)
    demonstrations = demonstrate(
        environment, [{"map": lake} for lake in MAPS * 4], TurnEncoder(processor), noise=0.7, seed=0
    )
    imitate(
        made, demonstrations, steps=20 if picture else 50, batch_size=8 if picture else 16, learning_rate=3e-3, seed=0
    )
    return made.state_dict()


def new_model(picture):
    build = agents.build_vision_agent if picture else agents.build_text_agent
    return build(0, hidden_size=32, num_layers=1 if picture else 2)


def model(picture=False):
    made = new_model(picture)
    made.load_state_dict(weights(picture))
    return made


def dataset(maps=MAPS * 3, **settings):
    environment = make_environment("frozen_lake", **(SETTINGS | settings))
    return dataset_of(environment, [{"map": lake} for lake in maps])


def trainer(
    output_dir,
    *,
    trainer_class=RollwiseGRPOTrainer,
    rollouts=None,
    reward_funcs=episode_reward,
    train_dataset=None,
    eval_dataset=None,
    callbacks=None,
    picture=False,
    **settings,
):
    made = trainer_class(
        model=model(picture=picture),
        reward_funcs=reward_funcs,
        args=tiny.config(output_dir, **({"max_completion_length": 2, "learning_rate": 3e-3} | settings)),
        train_dataset=dataset(picture=picture) if train_dataset is None else train_dataset,
        eval_dataset=eval_dataset,
        processing_class=agents.build_processor() if picture else agents.build_tokenizer(),
        rollout_func=rollouts or EpisodeRollouts("frozen_lake", picture=picture, **SETTINGS),
        callbacks=callbacks,
    )
    made.remove_callback(PrinterCallback)
    return made


@dataclass(kw_only=True, eq=False)
class BreakingLake(FrozenLake):
    """Raises on a step downwards; on maps that begin with SG it does not even begin, after the data set is made."""

    def _begin(self, spec):
        if spec["map"].startswith("SG"):
            raise RuntimeError("no lake today")
        return super()._begin(spec)

    def _play(self, answer):
        if answer == "down":
            raise RuntimeError("the ice broke")
        return super()._play(answer)


class EpisodeReference(GradientReference):
    """Tells answers from what was shown by the tokens alone, and plays the episode again on a lake of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokenizer = agents.build_tokenizer()
        self.shown = 0  # tokens of trained rows that the policy did not write

    def new_policy(self):
        return model().eval()

    def written(self, row):
        """An answer goes on until its end or until it is too long; the next one begins after `<agent>`."""
        end, begin = self.tokenizer.convert_tokens_to_ids([agents.EOS, agents.AGENT])
        mask, writing, length = [], True, 0
        for token in row["completion_ids"].tolist():
            mask.append(writing)
            length += 1
            if writing and (token == end or length == self.trainer.max_completion_length):
                writing = False
            elif not writing and token == begin:
                writing, length = True, 0
        return torch.tensor(mask)

    def num_tokens(self, row):
        return int(self.written(row).sum())

    def answers(self, row):
        found, current = [], []
        written = self.written(row).tolist()
        for i, (token, is_written) in enumerate(zip(row["completion_ids"].tolist(), written, strict=True)):
            if is_written:
                current.append(token)
            if current and (i + 1 == len(written) or not written[i + 1]):
                found.append(self.tokenizer.decode(current, skip_special_tokens=True))
                current = []
        return found

    def start(self, row, lake):
        """The prompt is the map, with the player on it."""
        return f"<user>{chr(10).join(lake).replace('S', 'P')}<agent>" == self.tokenizer.decode(row["prompt_ids"])

    def reward(self, rollout):
        row, example = self.rows[id(rollout)], self.trainer.train_dataset[rollout.prompt_id]
        lake = example["spec"].split('"')[3].split("/")
        assert self.start(row, lake)
        place, total, answers = (0, 0), 0.0, self.answers(row)
        for turn, answer in enumerate(answers):
            assert turn < SETTINGS["max_turns"]
            action = parse_action(answer, numbered(tuple(MOVES)))
            if action is None:
                total += SETTINGS["malformed_reward"]
                continue
            move = MOVES[action]
            near = (place[0] + move[0], place[1] + move[1])
            if 0 <= near[0] < len(lake) and 0 <= near[1] < len(lake[0]):
                place = near
            cell = lake[place[0]][place[1]]
            if cell in "HG":
                assert turn == len(answers) - 1
                return total + float(cell == "G")
        assert len(answers) == SETTINGS["max_turns"]
        return total

    def logps(self, model, row):
        written = self.written(row)
        self.shown += int((~written).sum())
        return super().logps(model, row)[written]


class VisionEpisodeReference(EpisodeReference):
    """As above, with each picture of an episode processed anew, alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.processor = agents.build_processor()
        self.environment = make_environment("frozen_lake", picture=True, **SETTINGS)
        self.pictures = []  # per trained row
        self.lakes = {}  # id of a row -> its map

    def new_policy(self):
        return model(picture=True).eval()

    def start(self, row, lake):
        return self.tokenizer.decode(row["prompt_ids"]).startswith("<user><|vision_start|><|image_pad|>")

    def frames(self, row, lake):
        """Every picture that the policy was shown: the first one, and one after each answer but the last."""
        found = [self.environment.begin({"map": "/".join(lake)}, 0).images[0]]
        found += [self.environment.take_turn(answer).observation.images[0] for answer in self.answers(row)[:-1]]
        return found

    def reward(self, rollout):
        row, example = self.rows[id(rollout)], self.trainer.train_dataset[rollout.prompt_id]
        self.lakes[id(row)] = example["spec"].split('"')[3].split("/")
        return super().reward(rollout)

    def logps(self, model, row):
        written = self.written(row)
        self.shown += int((~written).sum())
        frames = self.frames(row, self.lakes[id(row)])
        pieces = [self.processor(text=agents.IMAGE, images=[frame], return_tensors="pt") for frame in frames]
        pixels = torch.cat([piece["pixel_values"] for piece in pieces])
        grids = torch.cat([piece["image_grid_thw"] for piece in pieces])
        self.pictures.append(len(frames))
        stored = np.pad(row["pixel_values"], (0, math.prod(row["pixel_values.shape"]) - len(row["pixel_values"])))
        assert np.array_equal(stored.reshape(row["pixel_values.shape"]), pixels.numpy())
        ids = torch.tensor([*row["prompt_ids"].tolist(), *row["completion_ids"].tolist()])
        patch = self.tokenizer.convert_tokens_to_ids(agents.IMAGE)
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        inputs |= {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == patch).long()[None]}
        logits = model(**inputs).logits[0, len(row["prompt_ids"]) - 1 : -1]
        completion = torch.tensor(row["completion_ids"].tolist())
        return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0][written]
