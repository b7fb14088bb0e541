"""Real runs of verl on the CPU, in a process of their own: settings, data and what comes out of them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from rollwise.tasks.arithmetic import generate_problems, model_path

HERE = Path(__file__).parent
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}"
TIMEOUT_SECONDS = 3600  # a run takes half a minute where nothing else runs


def make_inputs(folder, num_prompts=64, levels=("sort-3", "add-2", "running_sum-3"), seed=0):
    """The shipped arithmetic model with a chat template, and problems as verl wants them."""
    import pandas

    model = Path(folder) / "model"
    shutil.copytree(model_path(), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": problem.task,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, problem in enumerate(generate_problems(num_prompts, seed=seed, levels=levels))
    ]
    pandas.DataFrame(rows).to_parquet(Path(folder) / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(Path(folder) / "val.parquet")


def overrides(folder, *, steps, ranks=1, prompts=4, rollouts=4, max_tokens=8):
    """Hydra overrides of a small run in single precision."""
    folder = Path(folder)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=24",
        f"data.max_response_length={max_tokens}",
        "data.dataloader_num_workers=0",
        "data.filter_overlong_prompts=False",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-3",
        f"{rollout}.name=transformers",
        f"{rollout}.mode=async",
        f"{rollout}.n={rollouts}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.n_gpus_per_node={ranks}",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/verl_on_cpu/reward.py",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16",
        # Idle workers without verl's environment, which none of its actors can use.
        "+ray_kwargs.ray_init._system_config.enable_worker_prestart=False",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        f"hydra.run.dir={folder}/hydra",
    ]


class Run:
    """What a run left: its exit code, its output, and the figures of each step."""

    def __init__(self, folder, name, exit_code, output):
        self.exit_code = exit_code
        self.output = output
        path = Path(folder) / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.steps = [json.loads(line)["data"] for line in lines]
        self.folder = Path(folder) / f"{name}-recorded"
        events = self.folder / "events.jsonl"
        self.events = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []

    def of_kind(self, kind):
        return [event for event in self.events if event["kind"] == kind]


def launch(folder, name, *extra, main="rollwise.verl.main", env=None, **settings):
    """Run `python -m <main>` to its end; Ray ends with it."""
    folder = Path(folder)
    recorded = folder / f"{name}-recorded"
    recorded.mkdir()
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_ON_CPU_RECORD": str(recorded),
        "VERL_ON_CPU_REQUEST_LOG": str(recorded / "requests.jsonl"),
        "VERL_FILE_LOGGER_PATH": str(folder / f"{name}.jsonl"),
        # Not tests/, whose folder trl verl would take for the package.
        "PYTHONPATH": os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).strip(":"),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray would have its workers wait for whatever else this machine does
        # For machines that are busy with other things.
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", main, *overrides(folder, **settings), *extra]
    output = folder / f"{name}.log"
    with open(output, "w") as file:
        process = subprocess.Popen(
            command,
            env=environment | (env or {}),
            cwd=folder,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a Ctrl-C is for the tests, which then end the run
        )
    try:
        process.wait(TIMEOUT_SECONDS)
    finally:
        _kill_all_of(recorded)
    return Run(folder, name, process.wait(), output.read_text())


def _kill_all_of(recorded):
    """End what is left of a run, Ray's daemons too: they have its environment."""
    marker = f"VERL_ON_CPU_RECORD={recorded}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (folder / "environ").read_bytes() + b"\0":
                os.kill(int(folder.name), signal.SIGKILL)
