import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollwise.errors import ConfigError, VersionError
from rollwise.evaluation import verify as verify_module
from rollwise.evaluation.verify import ExactVerifier, MathVerifier, Verdict, VerifierError, last_boxed, make_verifier

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "answer_pairs.jsonl").read_text().splitlines()]
HANGS = r"\boxed{9^{9^{9^{9^9}}}}"


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(timeout_seconds=60) as verifier:
        yield verifier


def expected(pair):
    """Where math-verify errs, it either calls a right answer wrong or cannot read it: never the other way round."""
    if "math_verify_errs" in pair:
        return ("wrong", "unscored") if pair["right"] else ("right",)
    return ("right",) if pair["right"] else ("wrong",)


def check(verifier, pairs):
    wrong = [
        (pair["kind"], pair["answer"], pair["completion"], found)
        for pair in pairs
        if (found := verifier.verify(pair["completion"], pair["answer"])).verdict not in expected(pair)
    ]
    assert not wrong


def test_the_pairs_are_many_of_every_kind_right_and_wrong():
    assert len(PAIRS) >= 200
    kinds = {pair["kind"] for pair in PAIRS}
    assert kinds >= {"fraction", "interval", "set", "matrix", "unit", "text", "degrees", "percent", "mixed number"}
    for kind in kinds - {"time"}:
        assert {pair["right"] for pair in PAIRS if pair["kind"] == kind} == {True, False}
    assert sum("math_verify_errs" in pair for pair in PAIRS) <= len(PAIRS) * 0.05


def test_one_pair_of_every_kind(verifier):
    check(verifier, {(pair["kind"], pair["right"]): pair for pair in PAIRS if "math_verify_errs" not in pair}.values())


@pytest.mark.slow
def test_all_pairs(verifier):
    """Where math-verify is known to err the pair says so, and why; a version that no longer does fails here too."""
    check(verifier, PAIRS)


def test_what_hangs_is_unscored_in_bounded_time_and_the_next_answer_is_scored():
    with MathVerifier(timeout_seconds=60) as verifier:
        assert verifier.verify(r"\boxed{4}", "4.0").verdict == "right"
        first = verifier._child.process
        verifier.timeout_seconds = 1.0
        began = time.monotonic()
        found = verifier.verify(HANGS, "3")
        assert time.monotonic() - began < 30
        assert found == Verdict("unscored", "9^{9^{9^{9^9}}}", "no verdict within 1 s")
        assert found.is_right is None
        assert first.poll() is not None
        verifier.timeout_seconds = 60.0
        assert verifier.verify(r"\boxed{\frac{8}{2}}", "4").is_right is True
        assert verifier.verify(r"\boxed{5}", "4").is_right is False


def test_it_works_from_a_thread_where_math_verify_s_own_limit_fails(verifier):
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append((i, verifier.verify(f"so ${i}/2$", "1").verdict)))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(0, "wrong"), (1, "wrong"), (2, "right"), (3, "wrong")]


def test_a_process_that_dies_is_unscored_and_replaced(verifier):
    verifier.verify("$1$", "1")
    verifier._child.process.kill()
    verifier._child.process.wait()
    assert verifier.verify("$1$", "1") == Verdict("unscored", None, "the verifying process died")
    assert verifier.verify("$1$", "1").verdict == "right"


def test_an_answer_that_cannot_be_read_is_unscored_unless_it_is_the_same(verifier):
    assert verifier.verify("the answer is 4", "?").reason == "the right answer cannot be read"
    assert verifier.verify(r"\boxed{?}", "?").is_right is True


def test_no_answer_is_wrong(verifier):
    assert verifier.verify("I do not know.", "4") == Verdict("wrong", None, "no answer found")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"a \boxed{1} b \boxed{ \frac{1}{2} } c", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1", None),
        ("1", None),
    ],
)
def test_the_last_box(text, found):
    assert last_boxed(text) == found


def test_the_embedded_task_compares_characters():
    verifier = ExactVerifier()
    assert verifier.verify("0235", "0235") == Verdict("right", "0235")
    assert verifier.verify("235", "0235") == Verdict("wrong", "235")
    verifier.close()


def test_wrong_settings_and_a_missing_library_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"timeout_seconds is 0"):
        MathVerifier(0)
    with pytest.raises(ConfigError, match=r"unknown verifier 'maths': choose math .* or exact"):
        make_verifier("maths")
    assert isinstance(make_verifier("exact"), ExactVerifier)
    monkeypatch.setattr(verify_module, "find_spec", lambda name: None)
    with pytest.raises(VersionError, match=r"pip install 'rollwise\[eval\]'"):
        make_verifier("math")


def test_a_process_that_cannot_start_ends_the_run(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VerifierError, match="did not start"):
        MathVerifier().verify("$1$", "1")


def test_an_orphan_ends_by_itself():
    """The parent may be killed while an answer hangs: an alarm ends the worker then."""
    command = [sys.executable, "-m", "rollwise.evaluation.worker", "1", str(2**32)]
    request = json.dumps({"completion": HANGS, "answer": "3"}) + "\n"
    result = subprocess.run(command, input=request, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode != 0
    assert result.stdout.splitlines() == ['{"ready": true}']
