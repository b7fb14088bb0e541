"""The commands, their help, and nothing else: each one imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rollwise._version import __version__
from rollwise.commands.errors import errors_to_exit_codes
from rollwise.usage import UsageError

app = typer.Typer(
    name="rollwise",
    help="GRPO training of language models that spends fewer rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TAKES_FIELDS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollwise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """GRPO training of language models that spends fewer rollouts."""


@app.command(context_settings=_TAKES_FIELDS, options_metavar="[--FIELD VALUE]...")
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="Flat TRL and Rollwise fields.")],
) -> None:
    """Train a model with TRL's GRPO and Rollwise.

    Any field of a recipe can be overridden by a flag of the same name:
    [bold]rollwise train examples/arithmetic_all.yaml --max_steps 20 --seed 1[/]

    \b
    [bold]Data[/]     --dataset_name    arithmetic, a hub name, a folder, file.jsonl
             --dataset_test_rows N    hold out rows where no test split is
             --arithmetic_train_problems, --arithmetic_levels, ...
    [bold]Reward[/]   --reward_funcs    arithmetic, accuracy_reward, my_module.my_reward
    [bold]Model[/]    --model_name_or_path    arithmetic, or what TRL takes
    [bold]Method[/]   --allocation uniform | pilot_commit | belief    --replay_ratio R
             and all other fields of RollwiseGRPOConfig
    [bold]Trainer[/]  --learning_rate, --num_generations, ...: TRL's GRPOConfig
    [bold]Run[/]      --run_name NAME (its folder is runs/NAME)    --output_dir
             --overwrite    --resume_from_checkpoint latest
    [bold]Compare[/]  --baseline    afterwards plain GRPO, until it is as accurate
             --baseline_budget 3    within 3 times the run's rollouts
             --baseline_minutes M   and within M minutes
    """
    with errors_to_exit_codes():
        if recipe.startswith("-"):
            raise UsageError(f"the recipe comes first, not {recipe!r}: rollwise train RECIPE.yaml [--field value]...")
        from rollwise.commands.train import train as run

        run(Path(recipe), context.args)


_TAKE_SEVERAL = ("--seeds", "--arms", "--methods", "--benchmark", "--k")


class _SeveralValues(TyperCommand):
    """Reads `--seeds 0 1 2` as click reads `--seeds 0 --seeds 1 --seeds 2`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further value, then parse."""
        repeated: list[str] = []
        option, values = "", 0
        for word in args:
            if word.startswith("-"):
                option, values = (word if word in _TAKE_SEVERAL else ""), 0
            else:
                values += 1
                if option and values > 1:
                    repeated.append(option)
            repeated.append(word)
        return super().parse_args(ctx, repeated)


@app.command(cls=_SeveralValues)
def study(
    path: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Arms, seeds and settings.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; runs/NAME by default.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; as many as cores by default. On one GPU: 1.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option(metavar="SEED...", help="Make only the runs of these seeds.")
    ] = None,
    arms: Annotated[list[str] | None, typer.Option(metavar="ARM...", help="Make only the runs of these arms.")] = None,
    aggregate_only: Annotated[
        bool,
        typer.Option(
            "--aggregate-only",
            help="Make no runs, compare those that are done; --seeds and --arms then choose among them.",
        ),
    ] = False,
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="Rollouts to the target: interpolate between evaluations.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Compare methods over several seeds, each run in a process of its own.

    A study is a YAML file. Each arm is a method: the settings that make it,
    on top of a recipe that all share.

    \b
        name: replay
        seeds: [0, 1, 2, 3, 4]
        base: ../examples/arithmetic_grpo.yaml    # path from this file
        recipe: {max_steps: 60}                   # settings of all arms
        arms:
          grpo: {}                                # the first: the baseline
          replay: {replay_ratio: 1.0, learning_rate: 3.0e-4}

    \b
    [bold]Optional[/]  baseline: ARM            the others are compared with it
              target: 0.5              accuracy that rollouts are counted to
              budget_rollouts: [5000]  where accuracies are compared
              per_seed: {model_name_or_path: "bases/{seed}"}
              an arm's own recipe: FILE.yaml, in place of base

    The same command goes on where it was stopped: finished runs are kept, others start again.
    The study's folder then holds summary.json and study.parquet (a row per run and evaluation).
    """
    with errors_to_exit_codes():
        from rollwise.commands.study import study as run

        run(
            path,
            output=output,
            processes=processes,
            seeds=seeds,
            arms=arms,
            aggregate_only=aggregate_only,
            interpolate=interpolate,
            markdown=markdown,
        )


@app.command(cls=_SeveralValues)
def simulate(
    path: Annotated[Path | None, typer.Argument(metavar="SIMULATION.yaml", help="Fields as below.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD...", help="Allocations, the first is the baseline; settings behind a colon."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts in the pool; 10,000, or as the file has.")] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="PRESET|FILE", help="rlvr, hard or flat; or .csv, .json, .parquet of rates.")
    ] = None,
    bins: Annotated[
        str | None, typer.Option(metavar="RATE:WEIGHT,...", help="Or a histogram: 0:0.4,0.1-0.5:0.2,1:0.4")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Rollouts of a trained group; 16.")] = None,
    train_prompts: Annotated[int | None, typer.Option(help="Prompts trained on per step; 128.")] = None,
    steps: Annotated[int | None, typer.Option(help="Most steps of a run.")] = None,
    budget_rollouts: Annotated[
        int | None, typer.Option(help="Most rollouts of a run; 1,000,000 where no steps are given.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Mean success that rollouts are counted to; a run ends there.")
    ] = None,
    gain_per_group: Annotated[
        float | None, typer.Option(help="Logits the policy gains from a group that is half right; 0.0001.")
    ] = None,
    critical_groups: Annotated[
        float | None, typer.Option(help="Groups of a step at which each gains half as much; off.")
    ] = None,
    forgetting: Annotated[float | None, typer.Option(help="Share of the gain that each step loses; 0.")] = None,
    patience_prompts: Annotated[
        int | None, typer.Option(help="End after so many prompts in a row without a gradient; 1000. 0: never.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option(metavar="SEED...", help="0 1 2")] = None,
    engine: Annotated[
        str | None, typer.Option(help="scheduler, counted, or auto: the scheduler up to 200,000 rollouts.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time; the result is the same.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with picture and tables.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all figures.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Predict what methods cost, before any GPU hour, with the real scheduler and a policy without a model.

    [bold]rollwise simulate --methods uniform pilot_commit:pilot_rollouts=8 belief --rates counts.csv[/]

    \b
    A SIMULATION.yaml holds the same fields, with underscores; flags override it:
        prompts: 40000
        rates: counts.csv          # columns correct and total, or rate
        methods:
          grpo: {allocation: uniform}
          pilot_commit: {p_upper: 0.9}
        target: 0.6

    It shows rollouts per step, waste by outcome, epochs, and rollouts to the target.
    docs/simulate.md says what the model of learning can and cannot tell.
    """
    with errors_to_exit_codes():
        from rollwise.commands.simulate import simulate as run
        from rollwise.simulation.spec import parse_methods

        given = {
            "prompts": prompts,
            "rates": rates,
            "bins": bins,
            "group_size": group_size,
            "train_prompts": train_prompts,
            "steps": steps,
            "budget_rollouts": budget_rollouts,
            "target": target,
            "gain_per_group": gain_per_group,
            "critical_groups": critical_groups,
            "forgetting": forgetting,
            "patience_prompts": patience_prompts,
            "seeds": seeds or None,
            "engine": engine,
            "methods": parse_methods(methods) if methods else None,
        }
        overrides = {name: value for name, value in given.items() if value is not None}
        run(path, overrides=overrides, html=html, json=json, markdown=markdown, processes=processes)


@app.command(cls=_SeveralValues)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="arithmetic, a folder, or a name on the hub.")],
    benchmark: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE...", help="arithmetic, math500, aime24, ...; or .jsonl, .json, .parquet."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions of each problem.")] = 8,
    k: Annotated[
        list[int] | None, typer.Option(metavar="K...", help="The k of pass@k; 1 and --samples by default.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The folder; runs/evaluate-MODEL by default.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this probability.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of a completion; 4096, or 10 for arithmetic.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    engine: Annotated[
        str, typer.Option(help="transformers, vllm, or auto: vLLM if it is installed and there is a GPU.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Samples generated, and stored, at a time.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: as they were saved.")] = "auto",
    chat_template: Annotated[
        bool, typer.Option(help="Ask through the tokenizer's chat template, where it has one.")
    ] = True,
    instruction: Annotated[
        str | None, typer.Option(help="What follows each problem, in place of a request for a boxed answer.")
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(help="math: by math-verify; exact: the same characters. By benchmark.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit for verifying one sample.")] = 10.0,
    problem_column: Annotated[str | None, typer.Option(help="A file's column; problem, question or prompt.")] = None,
    answer_column: Annotated[
        str | None, typer.Option(help="A file's column; answer, final_answer or expected_answer.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many problems.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Another evaluation's folder: compare by AES, accuracy against length.")
    ] = None,
    reverify: Annotated[
        bool, typer.Option("--reverify", help="Verify the stored samples anew; generate nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete these benchmarks' samples first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Measure a model on benchmarks: pass@k, avg@k, lengths of right and wrong answers.

    [bold]rollwise evaluate runs/mine --benchmark math500 aime25 --samples 16 --k 1 8 16[/]

    \b
    [bold]Benchmarks[/]  arithmetic, math500, aime24, aime25, aime26, hmmt_feb25,
                hmmt_feb26, amc23, minerva, olympiadbench; or a file of
                problems and answers

    The same command goes on where it was stopped. Samples are kept as Parquet:
    other k, AES and --reverify generate nothing. An answer that cannot be verified
    in time is unscored, never wrong. docs/measuring.md has the formulas.
    """
    with errors_to_exit_codes():
        from rollwise.commands.evaluate import Options
        from rollwise.commands.evaluate import evaluate as run

        options = Options(
            samples=samples,
            ks=k or (),
            output=output,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seed=seed,
            engine=engine,
            batch_size=batch_size,
            dtype=dtype,
            chat_template=chat_template,
            instruction=instruction,
            verifier=verifier,
            timeout_seconds=timeout_seconds,
            problem_column=problem_column,
            answer_column=answer_column,
            limit=limit,
            reference=reference,
            reverify=reverify,
            overwrite=overwrite,
            markdown=markdown,
        )
        run(model, benchmark or [], options)


@app.command(context_settings=_TAKES_FIELDS, options_metavar="[--FIELD VALUE]...")
def pilot(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe of `rollwise train`.")],
    output: Annotated[Path, typer.Argument(metavar="COUNTS.csv", help="Where the counts go.")],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the train split, at random.")] = 256,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each; 4 or more tell the spread.")] = 8,
) -> None:
    """Try a recipe's model on some of its prompts, and say how hard they are: before anything is trained.

    [bold]rollwise pilot recipe.yaml counts.csv[/] and then
    [bold]rollwise simulate --rates counts.csv --prompts 40000[/]
    """
    with errors_to_exit_codes():
        from rollwise.commands.pilot import pilot as run

        run(recipe, output, prompts=prompts, rollouts=rollouts, flags=context.args)


@app.command()
def pretrain(
    output_dir: Annotated[Path, typer.Argument(help="Folder for the model and its tokenizer.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the problems.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Most optimizer steps; it stops once accurate.")] = None,
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; the weights depend on it.")] = None,
    task: Annotated[
        str,
        typer.Option(help="arithmetic, or an agent: frozen_lake, frozen_lake_vision, sokoban, search_qa, countdown."),
    ] = "arithmetic",
) -> None:
    """Make an embedded model again, from random weights, in a few minutes on a CPU."""
    with errors_to_exit_codes():
        from rollwise.commands.pretrain import pretrain as run

        run(output_dir, seed=seed, steps=steps, num_threads=num_threads, task=task)


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest is taken).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Also write all stored rollouts to this file.")] = None,
    top: Annotated[int, typer.Option(min=0, help="Rollouts of the largest |advantage| to show.")] = 10,
) -> None:
    """Show what a checkpoint's replay buffer, survivors and ledger hold."""
    with errors_to_exit_codes():
        from rollwise.commands.inspect import inspect as run

        run(checkpoint, as_json=as_json, parquet=parquet, top=top)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_STUDY...", help="Folders of runs and of studies, finished or going.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file; report.html in the folder by default, or here if there are several.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="ARM", help="The arm to compare with; the study's, or the first.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy that rollouts are counted to; the study's, or the smallest peak.")
    ] = None,
    samples: Annotated[bool, typer.Option(help="Show rollouts, where a run has some.")] = True,
) -> None:
    """Show what runs and studies measured on one HTML page, which needs no network.

    [bold]rollwise report runs/arithmetic_all[/]
    [bold]rollwise report runs/replay_study --output replay.html[/]

    Runs that differ only in their seed are one method. Runs that are still going can be shown too.
    """
    with errors_to_exit_codes():
        from rollwise.commands.report import report as run

        run(folders, output=output, baseline=baseline, target=target, samples=samples)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what is installed, whether it fits and works here, and what to install for what.

    Exit code 0: all that `rollwise train` needs works. 1: something is missing, out of the supported range, or fails.
    """
    with errors_to_exit_codes():
        from rollwise.commands.doctor import doctor as run

        if not run(as_json=as_json):
            raise typer.Exit(1)
