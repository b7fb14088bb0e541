"""The tests on every supported Python, and on the oldest, a middle and the newest release of TRL.

    pipx run nox -s tests-3.12            # all tests on one Python
    pipx run nox -s "trl(oldest)"         # what drives TRL, on one release of it
    pipx run nox                          # all of it: an hour or two

Each session has an environment of its own, about 2 GB with the CPU build of torch; `-r` keeps them.
"""

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
#: Each with the transformers of its time.
TRL = {
    "oldest": ["trl==1.0.0", "transformers==4.57.6", "huggingface_hub<1.0"],
    "middle": ["trl==1.8.0", "transformers==5.8.0", "requests"],
    "newest": ["trl==1.16.0"],
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TORCH = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, with the tested versions of everything."""
    session.install("-c", "constraints.txt", *TORCH, "-e", ".[trl,dev]")
    session.run("pytest", "-n", "auto", *session.posargs, env=OFFLINE)


@nox.session(python=PYTHONS[0])
@nox.parametrize("release", list(TRL), ids=list(TRL))
def trl(session: nox.Session, release: str) -> None:
    """The tests of the adapter and of the commands on it."""
    session.install(*TORCH, "-e", ".[trl,dev]", "torch==2.13.0", *TRL[release])
    # Releases of `datasets` that go with the older ones leave files for the garbage collector to close.
    tolerant = ["-W", "ignore::pytest.PytestUnraisableExceptionWarning"] if release != "newest" else []
    session.run("pytest", "-n", "auto", *tolerant, "tests/trl", "tests/commands", *session.posargs, env=OFFLINE)
