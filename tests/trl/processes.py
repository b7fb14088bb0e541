"""Training runs on several processes: starting these costs more than a run of a few steps, so they make many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from filelock import FileLock

HERE = Path(__file__).parent
TIME_LIMIT = 600  # seconds, for all runs of a launch


class Launch:
    """What the processes of one worker module found, run by run.

    Args:
        worker: Name of the module; it calls `serve`.
        tmp_path_factory: Of pytest. All workers of pytest-xdist share one launch: the first that asks for it makes it.
        runs: Arguments of each run.
        num_processes: How many processes.
    """

    def __init__(self, worker, tmp_path_factory, runs, num_processes):
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent
        self._folder = folder / f"{worker.removesuffix('.py')}-{num_processes}"
        self._runs, self._num_processes = runs, num_processes
        self._log = self._folder / "log.txt"
        self._folder.mkdir(exist_ok=True)
        with FileLock(self._folder / "lock"):
            if not self._log.exists():
                self._launch(worker)

    def _launch(self, worker):
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        number = f"--nproc_per_node={self._num_processes}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", number, str(HERE / worker)]
        command += [str(self._folder), json.dumps(self._runs)]
        with (
            self._log.open("w") as log,
            subprocess.Popen(command, env=environment, stdout=log, stderr=log) as processes,
        ):
            try:
                processes.wait(TIME_LIMIT)
            except subprocess.TimeoutExpired:
                processes.terminate()  # unlike a kill, it takes the workers along, after 30 s at most
                log.write(f"\nnot done after {TIME_LIMIT} s\n")

    def results(self, *run):
        """What each process returned for this run; those before one that failed are there."""
        folder = self._folder / str(self._runs.index(list(run)))
        files = [folder / f"result-{rank}.json" for rank in range(self._num_processes)]
        assert all(file.is_file() for file in files), self._log.read_text()[-3000:]
        return [json.loads(file.read_text()) for file in files]


def serve(run):
    """Make the runs that this process was started for: `run(scenario, folder, *more)` gives what is JSON-able."""
    torch.set_num_threads(1)
    for i, (scenario, *more) in enumerate(json.loads(sys.argv[2])):
        folder = Path(sys.argv[1]) / str(i)
        result = run(scenario, folder, *more)
        folder.mkdir(exist_ok=True)
        (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's that outlives the interpreter would abort the process now and then
