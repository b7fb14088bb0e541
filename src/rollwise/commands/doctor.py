"""`rollwise doctor`: what is installed, whether it fits and works here, and what to install for what."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from rollwise._version import __version__
from rollwise.usage import one_line

Status = Literal["works", "missing", "unsupported", "fails"]

#: A probe that takes longer has failed: some libraries hang where their device is missing.
PROBE_SECONDS = 120.0

_DEVICE = """
import json, os, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "cpu_threads": os.cpu_count(),
    "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
    "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
    "mps": torch.backends.mps.is_available(),
}))
"""
_MATH = """
from rollwise.evaluation.verify import make_verifier
verifier = make_verifier("math")
verdict = verifier.verify("so it is \\\\boxed{1/2}", "0.5")
verifier.close()
assert verdict.is_right, verdict
"""
_TENSORBOARD = """
import tempfile
from torch.utils.tensorboard import SummaryWriter
with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
    writer.add_scalar("rollwise/doctor", 1.0)
"""


@dataclass(frozen=True)
class Component:
    """Something that Rollwise uses.

    Attributes:
        package: Its name on PyPI.
        purpose: What it is for.
        extra: The extra of this package that brings it; "": the package itself; None: it has to be installed by name.
        probe: Python that ends with an error where it does not work; it runs in a process of its own.
        is_required: Whether `rollwise train` needs it.
    """

    package: str
    purpose: str
    extra: str | None
    probe: str
    is_required: bool = False

    @property
    def install(self) -> str:
        """How to install it."""
        if self.extra is None:
            return f"pip install {self.package}"
        return f"pip install 'rollwise[{self.extra}]'" if self.extra else "pip install rollwise"


COMPONENTS = (
    Component("numpy", "the core", "", "import numpy", True),
    Component("torch", "training", "trl", "import torch; torch.ones(2).sum().item()", True),
    Component("transformers", "training", "trl", "import transformers", True),
    Component("accelerate", "training", "trl", "import accelerate", True),
    Component("datasets", "training", "trl", "import datasets", True),
    Component("trl", "training: rollwise.trl", "trl", "import rollwise.trl", True),
    Component("math-verify", "rollwise evaluate, rewards for mathematics", "eval", _MATH),
    Component("jinja2", "rollwise report", "report", "import rollwise.report.render"),
    Component("gymnasium", "environments of several turns", "envs", "import gymnasium"),
    Component("peft", "LoRA", None, "import peft"),
    Component("vllm", "fast generation on a GPU (use_vllm)", None, "import vllm; vllm.LLM"),
    Component("verl", "many machines, in an environment of its own", "verl", "import rollwise.verl.main"),
    Component("tensorboard", "report_to: tensorboard", None, _TENSORBOARD),
    Component("wandb", "report_to: wandb", None, "import wandb; wandb.init"),
    Component("trackio", "report_to: trackio", None, "import trackio; trackio.init"),
)


@dataclass(frozen=True)
class Finding:
    """What was found of a component.

    Attributes:
        package: Its name on PyPI.
        purpose: What it is for.
        version: The installed one; None: not installed.
        supported: The versions that Rollwise works with, as pip writes them; "" where any will do.
        status: Whether it works here.
        remedy: What to do; "" where nothing is to be done.
        is_required: Whether `rollwise train` needs it.
    """

    package: str
    purpose: str
    version: str | None
    supported: str
    status: Status
    remedy: str
    is_required: bool


def doctor(*, as_json: bool, console: Console | None = None) -> bool:
    """Look at everything and show what was found.

    Args:
        as_json: Print JSON instead of tables.
        console: Where to; stdout by default.

    Returns:
        Whether all that `rollwise train` needs is there and works.
    """
    console = console or Console()
    if as_json:
        device, findings = examine(COMPONENTS)
    else:
        with console.status("importing what is installed, each in a process of its own"):
            device, findings = examine(COMPONENTS)
    is_well = all(finding.status == "works" for finding in findings if finding.is_required)
    if as_json:
        content = {
            "rollwise": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device,
            "components": [asdict(finding) for finding in findings],
            "ok": is_well,
        }
        console.out(json.dumps(content, indent=2), highlight=False)
        return is_well
    console.print(f"rollwise {__version__}, Python {platform.python_version()}, {platform.platform()}")
    console.print(_device_line(device))
    console.print(_table(findings))
    todo = [finding for finding in findings if finding.remedy]
    for heading, required in (("rollwise train needs", True), ("if you want them", False)):
        chosen = [finding for finding in todo if finding.is_required == required]
        if chosen:
            console.print(f"[bold]{heading}[/]")
        for finding in chosen:
            console.print(f"  {finding.package}: {finding.remedy}", highlight=False, markup=False, soft_wrap=True)
    console.print("rollwise train works here" if is_well else "[bold red]rollwise train does not work here[/]")
    return is_well


def examine(components: Sequence[Component]) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Find the device (None where torch does not say) and what there is of each component."""
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        device = pool.submit(_device)
        findings = list(pool.map(_find, components))
        return device.result(), findings


def supported_versions(extra: str) -> dict[str, str]:
    """The ranges of versions that this package's own metadata asks for, by name.

    Args:
        extra: For this extra; "": for the package itself.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        lines = metadata.requires("rollwise") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return {}
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier)
        for requirement in requirements
        if (requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra)
    }


def _find(component: Component) -> Finding:
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    name = component.package
    versions = "" if component.extra is None else supported_versions(component.extra).get(canonicalize_name(name), "")
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    status: Status = "works"
    remedy = ""
    if version is None:
        status, remedy = "missing", component.install
    elif not SpecifierSet(versions).contains(version, prereleases=True):
        status, remedy = "unsupported", f"{version} is not within {versions}: pip install '{name}{versions}'"
    elif (error := _run(component.probe)[1]) is not None:
        status, remedy = "fails", f"{error}; reinstall it, or see docs/troubleshooting.md"
    return Finding(name, component.purpose, version, versions, status, remedy, component.is_required)


def _device() -> dict[str, Any] | None:
    output, error = _run(_DEVICE)
    try:
        found: dict[str, Any] | None = None if error else json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return found


def _run(code: str) -> tuple[str, str | None]:
    """Run Python in a process of its own; its output, and what went wrong or None."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it was not done within {PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return done.stdout, None
    said = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    reason = said[-1] if said else done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return done.stdout, one_line(reason)[:300]


def _device_line(device: dict[str, Any] | None) -> str:
    if device is None:
        return "device: unknown, for torch does not run here"
    if gpus := device["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in gpus)
        return f"device: {names}; bfloat16: {'yes' if device['bf16'] else 'no, set bf16: false'}"
    if device["mps"]:
        return "device: Apple GPU (mps); recipes: use_cpu: false, bf16: false"
    return f"device: CPU, {device['cpu_threads']} threads; recipes: use_cpu: true, bf16: false, as in examples/"


_COLOURS = {"works": "green", "missing": "dim", "unsupported": "red", "fails": "red"}


def _table(findings: Sequence[Finding]) -> Table:
    table = Table()
    for heading in ("package", "for", "installed", "supported", "here"):
        table.add_column(heading)
    for finding in findings:
        colour = "red" if finding.status == "missing" and finding.is_required else _COLOURS[finding.status]
        status = f"[{colour}]{finding.status}[/]"
        table.add_row(finding.package, finding.purpose, finding.version or "-", finding.supported or "any", status)
    return table
