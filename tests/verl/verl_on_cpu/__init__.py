"""verl on a machine without accelerators, for tests: a CPU platform and a rollout server made of transformers.

Everything else of a run is verl's own: Ray, TransferQueue, agent loop, reward loop, FSDP2 over gloo, losses, weight
sync. verl imports this through `VERL_USE_EXTERNAL_MODULES=verl_on_cpu`, in every process.
"""

import asyncio
import contextlib
import inspect
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def _init_gloo(timeout_second=None, backend=None):
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend="gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


def _run_in_order(self, executor, function, *args, _run=asyncio.BaseEventLoop.run_in_executor):
    """Where nothing is said, one thread: requests arrive, and rows come back, in the order of the prompts."""
    if executor is None and self._default_executor is None:
        self.set_default_executor(ThreadPoolExecutor(max_workers=1))
    return _run(self, executor, function, *args)


def _in_order(kv_list):
    """Rows in the order of their prompts, not in that in which they came: sums are rounded the same way."""

    def listed(*args, **kwargs):
        data = kv_list(*args, **kwargs)
        return data and {partition: dict(_sorted(items)) for partition, items in data.items()}

    return listed


def _sorted(items):
    prompts = {key: i for i, key in enumerate(key for key, tag in items.items() if tag.get("is_prompt"))}

    def place(item):
        parts = item[0].split("_")
        return (prompts.get(parts[0], len(prompts)), *map(int, parts[1:]))

    return sorted(items.items(), key=place)


def _patient(get_node):
    """Ray gives its daemons 30 s to come up, which is too little where the machine is busy with other things."""

    def wait_for_node(*args, **kwargs):
        end = time.monotonic() + 600
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)

    return wait_for_node


def _with_ports(init):
    """Name the ports of Ray's agents; where it has to ask them, Ray gives them 15 s to come up."""

    def with_ports(self, *args, **kwargs):
        init(self, *args, **kwargs)
        names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
        with contextlib.ExitStack() as stack:
            for name in names:
                free = stack.enter_context(socket.socket())
                free.bind(("", 0))
                setattr(self, name, free.getsockname()[1])

    return with_ports


def _with_port_file(start_raylet):
    """The one port that cannot be handed to Ray's daemon, which reads it from a file instead."""

    def start(*args, **kwargs):
        given = inspect.signature(start_raylet).bind(*args, **kwargs).arguments
        name = "dashboard_agent_listen_port"
        Path(given["session_dir"], f"{name}_{given['node_id']}").write_text(str(given[name]))
        return start_raylet(*args, **kwargs)

    return start


def _load_value_model(local_path, torch_dtype, model_config, trust_remote_code):
    """As verl's, which asks for flash attention whatever the configuration says."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
    )


def _load_replica():
    from verl_on_cpu.server import TransformersReplica

    return TransformersReplica


if os.environ.get("VERL_PLATFORM") == "cpu":
    import transfer_queue
    from ray._private import services
    from ray._private.parameter import RayParams

    transfer_queue.kv_list = _in_order(transfer_queue.kv_list)
    asyncio.BaseEventLoop.run_in_executor = _run_in_order
    services.get_node = _patient(services.get_node)
    services.start_raylet = _with_port_file(services.start_raylet)
    RayParams.__init__ = _with_ports(RayParams.__init__)

    import verl.utils.distributed
    import verl.utils.model

    from verl_on_cpu import platform  # noqa: F401 - registers itself

    verl.utils.distributed.initialize_global_process_group_ray = _init_gloo

    verl.utils.model.load_valuehead_model = _load_value_model

    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[("transformers", "async")] = "verl_on_cpu.server.ServerAdapter"
    replica.RolloutReplicaRegistry.register("transformers", _load_replica)

    if os.environ.get("VERL_ON_CPU_RECORD"):
        from verl_on_cpu import recording

        recording.record_decisions()
