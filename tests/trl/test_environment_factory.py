"""TRL's own multi-turn path: an `environment_factory` whose tools a model calls; the same rows, replayed as exactly."""

import pytest
import tiny
import transformers
import trl
from packaging.version import Version

pytest.importorskip("gymnasium", reason="environments need gymnasium")
if Version(trl.__version__) < Version("1.11") or Version(transformers.__version__) < Version("5.6"):
    pytest.skip("environment_factory needs transformers 5, and changed until TRL 1.11", allow_module_level=True)

import tiny_episodes
from datasets import Dataset
from tiny_episodes import MAPS, SETTINGS, EpisodeReference
from transformers import PrinterCallback
from trl.trainer import grpo_trainer

from rollwise.tasks import agents
from rollwise.tasks.levels import make_environment
from rollwise.trl import RollwiseGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<agent>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}</s>"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)


class Lake:
    """A lake as TRL wants an environment: `reset`, `get_reward`, and every other method a tool."""

    def __init__(self):
        self._lake = make_environment("frozen_lake", **SETTINGS)

    def reset(self, spec, **kwargs):
        self._reward, self._is_over = 0.0, False
        return self._lake.begin({"map": spec}, seed=0).text

    def move(self, action: str) -> str:
        """Move.

        Args:
            action: Where to.
        """
        if not self._is_over:
            turn = self._lake.take_turn(action)
            self._reward, self._is_over = self._reward + turn.reward, turn.done
        return self._lake.render() or "over"

    def get_reward(self):
        return self._reward


def parse(tokenizer, ids, prefix=None, tools=None):
    """Every answer that ended is a call of the tool, until the fourth one."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    shown = tokenizer.decode(prefix).count("<agent>")
    if ids[-1] != tokenizer.eos_token_id or shown > SETTINGS["max_turns"]:
        return {"role": "assistant", "content": text}
    call = {"type": "function", "function": {"name": "move", "arguments": {"action": text}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class ToolReference(EpisodeReference):
    """As for episodes; the rewards are the environments' own, and the masks are read off the tokens."""

    def new_policy(self):
        return tiny_episodes.model().eval()

    def reward(self, rollout):
        return rollout.reward


def test_rows_of_tools_are_replayed_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    tokenizer = agents.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {}
    reference = ToolReference()
    trainer = RollwiseGRPOTrainer(
        tiny_episodes.model(),
        None,
        tiny.config(tmp_path, max_completion_length=60, max_steps=3, replay_ratio=1.0, learning_rate=3e-3),
        Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], "spec": lake} for lake in MAPS * 2]),
        processing_class=tokenizer,
        environment_factory=Lake,
        callbacks=[reference],
    )
    trainer.remove_callback(PrinterCallback)
    reference.watch(trainer).train()
    assert len(reference.errors) == 3
    assert max(reference.errors) < 1e-5
    assert {"uniform", "replay"} == set(reference.sources)
    assert reference.shown > 0
    assert trainer.ledger.totals()["rollouts_generated"] == 48
