"""What a model card says of a run: what was spent, what was used again, the settings, and whom to cite."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from rollwise._version import __version__
from rollwise.ledger import Ledger

if TYPE_CHECKING:
    from rollwise.trl.config import RollwiseGRPOConfig

_PILOT_COMMIT = """@article{kim2026spend,
  title={Spend Your Rollouts Where It Counts: Rollout Allocation for Group-Based {RL} Post-Training},
  author={Kim, Woojeong and Yang, Ziyi and Yan, Jing Nathan and Liu, Jialu},
  journal={arXiv preprint arXiv:2605.26606}, year={2026}}"""
_REPLAY = """@article{yoo2026rollout,
  title={Rollout-Level Advantage-Prioritized Experience Replay for {GRPO}},
  author={Yoo, Gyeongtae and Park, Sanghyeok and Jang, Soohyuk and Kim, Ik-hwan and Yoon, Sungroh},
  journal={arXiv preprint arXiv:2606.04560}, year={2026}}"""
_FRESHNESS = """@article{ma2026freshness,
  title={Freshness-Aware Prioritized Experience Replay for {LLM}/{VLM} Reinforcement Learning},
  author={Ma, Weiyu and Zeng, Yongcheng and Song, Yan and Cui, Xinyu and Zhao, Jian and Liu, Xuhui
    and Elhoseiny, Mohamed},
  journal={arXiv preprint arXiv:2604.16918}, year={2026}}"""
_DAPO = """@article{yu2025dapo,
  title={{DAPO}: An Open-Source {LLM} Reinforcement Learning System at Scale},
  author={Yu, Qiying and others},
  journal={arXiv preprint arXiv:2503.14476}, year={2025}}"""
_GRESO = """@article{zheng2025act,
  title={Act Only When It Pays: Efficient Reinforcement Learning for {LLM} Reasoning via Selective Rollouts},
  author={Zheng, Haizhong and others},
  journal={arXiv preprint arXiv:2506.02177}, year={2025}}"""
_ADA = """@article{xiong2025reinforce,
  title={{Reinforce-Ada}: An Adaptive Sampling Framework for Reinforce-Style {LLM} Training},
  author={Xiong, Wei and others},
  journal={arXiv preprint arXiv:2510.04996}, year={2025}}"""

#: What to cite for an allocation, by its name.
_ALLOCATION_PAPERS = {
    "pilot_commit": _PILOT_COMMIT,
    "belief": _PILOT_COMMIT,  # its Prop. 3.1
    "dynamic_sampling": _DAPO,
    "history_skipping": _GRESO,
    "successive_elimination": _ADA,
}
#: Outcomes of pilots whose prompt was left alone.
_LEFT_ALONE = ("solved", "too_easy", "too_hard")


def citations(args: RollwiseGRPOConfig) -> list[str]:
    """BibTeX of the methods that a run uses."""
    found = [_ALLOCATION_PAPERS[args.allocation]] if args.allocation in _ALLOCATION_PAPERS else []
    replay = args.replay_settings()
    if replay.is_on:
        found.append(_REPLAY)
        decays = (replay.decay_tau_steps, replay.decay_tau_versions, replay.decay_tau_kl)
        if replay.updates_per_fresh or any(tau is not None for tau in decays):
            found.append(_FRESHNESS)
    return found


def settings(args: RollwiseGRPOConfig) -> dict[str, Any]:
    """Rollwise's own settings that are not at their defaults."""
    own = [field for field in fields(args) if field.name not in GRPOConfig.__dataclass_fields__]
    values = {field.name: (getattr(args, field.name), field.default) for field in own}
    return {name: value for name, (value, default) in values.items() if value != default}


def model_card_section(args: RollwiseGRPOConfig, ledger: Ledger, steps: int) -> str:
    """Markdown to put at the end of TRL's model card.

    Args:
        args: The run's settings.
        ledger: What became of its rollouts.
        steps: Training steps so far.
    """
    totals, outcomes = ledger.totals(), ledger.by_outcome()
    generated = totals["rollouts_generated"]
    spent: list[tuple[str, str]] = [
        ("training steps", f"{steps:,}"),
        ("rollouts generated", f"{generated:,}"),
        ("tokens generated", f"{totals['tokens_generated']:,}"),
        ("rollouts that reached a gradient", _share(totals["rollouts_trained"], generated)),
    ]
    spent += [
        (f"rollouts that did not: {name.replace('_', ' ')}", _share(count, generated))
        for name, count in outcomes.items()
        if count and name not in ("trained", "pending")
    ]
    if totals["rows_replayed"]:
        spent.append(("rows trained on again, without generating", f"{totals['rows_replayed']:,}"))
    if pilots := sum(outcomes.get(name, 0) for name in _LEFT_ALONE):
        allocation = args.allocation_settings()
        first, second = ("pilot", "commit") if hasattr(allocation, "pilot_rollouts") else ("first", "second")
        spared = round(pilots * getattr(allocation, f"{second}_rollouts") / getattr(allocation, f"{first}_rollouts"))
        spent.append(("rollouts spared: the rest of the groups of prompts left alone", f"{spared:,}"))
    lines = [
        "",
        "## Rollouts",
        "",
        f"GRPO with Rollwise {__version__}: allocation `{args.allocation}`, "
        + (f"replay ratio {args.replay_ratio:g}." if args.replay_settings().is_on else "no replay."),
        "",
        *_table(("", ""), spent),
    ]
    if chosen := settings(args):
        lines += ["", "Settings that are not at their defaults:", ""]
        lines += _table(("setting", "value"), [(f"`{name}`", f"`{value!r}`") for name, value in chosen.items()])
    for entry in citations(args):
        lines += ["", "```bibtex", entry, "```"]
    return "\n".join(lines) + "\n"


def _share(count: int, generated: int) -> str:
    return f"{count:,} ({count / generated:.1%})" if generated else f"{count:,}"


def _table(headings: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(headings)} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]
