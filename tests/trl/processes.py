"""Training runs on several processes: starting these costs more than a run of a few steps, so they make many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
TIME_LIMIT = 600  # seconds, for all runs of a launch


class Launch:
    """What the processes of one worker module found, run by run.

    Args:
        worker: Name of the module; it calls `serve`.
        folder: An empty folder.
        runs: Arguments of each run.
        num_processes: How many processes.
    """

    def __init__(self, worker, folder, runs, num_processes):
        self._folder, self._runs, self._num_processes = folder, runs, num_processes
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        command += [str(HERE / worker), str(folder), json.dumps(runs)]
        log = folder / "log.txt"
        with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as run:
            try:
                self._code = run.wait(TIME_LIMIT)
            except subprocess.TimeoutExpired:
                run.terminate()  # unlike a kill, it takes the workers along, after 30 s at most
                self._code = "none: they took too long"
        self._log = log.read_text()

    def results(self, *run):
        """What each process returned for this run; those before one that failed are there."""
        folder = self._folder / str(self._runs.index(list(run)))
        files = [folder / f"result-{rank}.json" for rank in range(self._num_processes)]
        assert all(file.is_file() for file in files), f"exit status {self._code}\n{self._log[-3000:]}"
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
