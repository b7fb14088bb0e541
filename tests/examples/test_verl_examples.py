"""What the recipes of examples/verl call: rewards, a tool, and the writer of their data. Needs neither verl nor Ray."""

import importlib.util
import json
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"


def load(name):
    """As verl loads a file that its configuration names."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def math_reward():
    module = load("math_reward")
    yield module
    module._verifier.close()


@pytest.mark.parametrize(
    ("solution", "answer", "score"),
    [
        ("So it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("First \\boxed{3}, no: \\boxed{4}", "4", 1.0),
        ("\\boxed{x=7}", "7", 1.0),
        ("\\boxed{8}", "7", 0.0),
        ("I do not know.", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_a_solution_is_right_if_its_answer_is_equal(math_reward, solution, answer, score):
    with ThreadPoolExecutor(1) as pool:  # a reward worker calls it in a thread
        reward = pool.submit(math_reward.compute_score, "", solution, answer, extra_info={}).result(60)
    assert reward == {"score": score, "acc": score}


def test_a_solution_that_cannot_be_compared_is_an_error_within_the_time_limit(math_reward, monkeypatch):
    monkeypatch.setattr(math_reward._verifier, "timeout_seconds", 0.5)
    with pytest.raises(ValueError, match="no verdict within 0.5 s"):
        math_reward.compute_score("", "\\boxed{9^{9^{9}}}", "8")
    monkeypatch.undo()
    assert math_reward.compute_score("", "\\boxed{16/2}", "8")["score"] == 1.0


@pytest.mark.parametrize(
    ("solution", "answers", "score"),
    [
        ("I looked it up. <answer>The Eiffel Tower!</answer>", ["eiffel tower", "Tour Eiffel"], 1.0),
        ("<answer>Rome</answer> or rather <answer>Paris\n</answer>", "paris", 1.0),
        ("<answer>Paris</answer> or rather <answer>Rome</answer>", "paris", 0.0),
        ("<answer>a theory</answer>", ["theory"], 1.0),
        ("<answer>anthem</answer>", ["them"], 0.0),
        ("Paris", ["Paris"], 0.0),
        ("<answer></answer>", ["Paris"], 0.0),
    ],
)
def test_an_answer_is_right_if_the_last_one_is_among_the_right_ones(solution, answers, score):
    assert load("answer_reward").compute_score("", solution, answers) == {"score": score, "acc": score}


@pytest.fixture
def load_tool(monkeypatch):
    """Loads the tool, with verl's decorator as far as it leaves the function alone."""
    module = types.ModuleType("verl.tools.function_tool")
    module.function_tool = lambda function: function
    for name in ("verl", "verl.tools"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.tools.function_tool", module)

    def load_with(url):
        monkeypatch.setenv("ROLLWISE_SEARCH_URL", url)
        return load("search_tool")

    return load_with


def test_the_search_tool_asks_the_server_and_joins_the_passages(load_tool):
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"passages": ["Paris is a city.", "Seine"]}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        tool = load_tool(f"http://127.0.0.1:{server.server_port}/")
        assert tool.search("capital of France") == "Paris is a city.\n\nSeine"
    assert asked == [{"query": "capital of France", "k": 3}]


def test_the_search_tool_gives_up_on_a_server_that_is_silent(load_tool):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # takes the connection and says nothing
        tool = load_tool(f"http://127.0.0.1:{server.server_port}/")
        tool.TIMEOUT_SECONDS = 0.2
        with pytest.raises(TimeoutError):
            tool.search("capital of France")


def test_the_search_tool_is_not_loaded_without_a_server(load_tool):
    with pytest.raises(RuntimeError, match="ROLLWISE_SEARCH_URL is not set"):
        load_tool("")


def write_questions(folder, num_rows, **columns):
    path = folder / "questions.jsonl"
    names = {"problem": "problem", "answer": "answer"} | columns
    rows = [{names["problem"]: f"What is {i} + {i}?", names["answer"]: str(2 * i)} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
    load("prepare_data").main()


def test_data_is_written_as_verl_reads_it(tmp_path, monkeypatch, capsys):
    prepare(monkeypatch, write_questions(tmp_path, 10), tmp_path / "out", "--num-val", 3)
    train, val = (pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert "7 problems in" in capsys.readouterr().out
    assert sorted(row["extra_info"]["index"] for row in train + val) == list(range(10))
    for row in train + val:
        i = row["extra_info"]["index"]
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert message["content"].startswith(f"What is {i} + {i}?\n")
        assert "\\boxed{}" in message["content"]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(2 * i)}
    prepare(monkeypatch, write_questions(tmp_path, 10), tmp_path / "again", "--num-val", 3)
    assert pq.read_table(tmp_path / "again" / "val.parquet").to_pylist() == val


def test_columns_and_instruction_are_the_users(tmp_path, monkeypatch):
    path = write_questions(tmp_path, 4, problem="question")
    prepare(monkeypatch, path, tmp_path / "out", "--question", "question", "--instruction", "Answer.")
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert len(rows) == 2
    assert all(row["prompt"][0]["content"].endswith("?\nAnswer.") for row in rows)
    with pytest.raises(SystemExit, match=r"has no column \['problem'\]; it has \['question', 'answer'\]"):
        prepare(monkeypatch, path, tmp_path / "out")
