import html.parser
import json
import re
import shutil
import subprocess

import pytest
from report_helpers import leave_run, leave_study_run, ledger, metrics

from rollwise.report import figures
from rollwise.report.data import gather
from rollwise.report.render import render, write_report

CHROMIUM = "/usr/bin/chromium"
NASTY = "</pre><script>alert('&\"')</script><img src=x onerror=alert(1)>"


class Outline(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects ids, references and texts."""

    VOID = frozenset({"meta", "link", "input", "path", "rect", "br", "img"})

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        for name in ("aria-labelledby", "aria-describedby"):
            self.references += attributes.get(name, "").split()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture
def page(tmp_path):
    study = tmp_path / "study"
    for seed in range(2):
        leave_study_run(study, "plain", seed, replay=False, pool=False)
        leave_study_run(study, "better", seed, ends=0.6 + seed / 10)
    leave_study_run(study, "plain", 2, done=False, rows=metrics(8), steps=20)
    return render(gather([study]))


def test_a_page_is_whole_named_and_has_every_part(page):
    outline = Outline(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.references) <= set(outline.ids)
    for words in (
        *("Still going", "8 of 20", "Methods compared", "times fewer", "Held-out accuracy against tokens generated"),
        *(
            "Rollouts to a held-out accuracy of 0.500",
            "Where the rollouts went",
            "zero variance",
            "Life of the prompt pool",
        ),
        *("How much rows still count, by age", "Age of the rows that replay drew", "95% interval", "(baseline)"),
    ):
        assert words in page, words
    charts = [attributes for tag, attributes in outline.tags if tag == "svg" and attributes.get("role") == "img"]
    tables = [tag for tag, attributes in outline.tags if attributes.get("class") == "values"]
    assert len(charts) == len(tables) > 8
    assert all(chart["aria-labelledby"] and chart["aria-describedby"] for chart in charts)


def test_a_page_needs_no_network(page):
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*['\"]?([^'\")\s>]+)", page)
    assert set(links) <= {"data:,", "#hatch"}
    assert "http" not in page


def test_texts_of_runs_are_escaped(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = leave_run(tmp_path / "<b>mine", settings={"note": NASTY})
    other = leave_run(tmp_path / "other", settings={"note": "\x00\x1b[31m"})
    (folder / "completions").mkdir()
    rows = [
        {"step": 1, "prompt": [{"role": "user", "content": NASTY}], "completion": NASTY + "\x00\x1b", "advantage": 1.0}
        | {"reward": 1.0}
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "completions" / "completions_00001.parquet")
    page = render(gather([folder, other]))
    Outline(page)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert page.count("&lt;script&gt;alert") >= 3  # setting, prompt, completion
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "user: &lt;/pre&gt;" in page


def test_episodes_are_shown_turn_by_turn_with_their_pictures(tmp_path):
    folder = leave_run(tmp_path / "mine")
    uri = "data:image/png;base64,iVBORw0KGgo="
    turns = [
        {"text": "P" + NASTY, "images": [uri], "answer": NASTY, "reward": 0.5},
        {"text": "the end", "images": [uri]},
    ]
    row = {
        "step": 3,
        "reward": None,
        "success": False,
        "ended_by": "error",
        "unscored": "the ice broke",
        "turns": turns,
    }
    (folder / "episodes.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    page = render(gather([folder]))
    outline = Outline(page)
    assert [attributes["src"] for tag, attributes in outline.tags if tag == "img"] == [uri, uri]
    assert [attributes["class"] for tag, attributes in outline.tags if tag == "li" and "class" in attributes] == [
        "turn",
        "turn",
    ]
    assert "unscored: the ice broke" in page
    assert "of which the last was not answered" in page
    assert "<script>alert" not in page


def test_halves_of_surrogate_pairs_can_be_written(tmp_path):
    folder = leave_run(tmp_path / "mine", settings={"note": "\ud800 and"})
    other = leave_run(tmp_path / "other", settings={"note": "b"})
    assert "\ufffd and" in write_report([folder, other], tmp_path / "out.html").read_text()


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    page = render(gather([leave_run(tmp_path / "mine", status="running", rows=[])]))
    Outline(page)
    assert "Still going" in page
    assert "Held-out accuracy</h2>" not in page


def test_an_old_run_without_word_may_have_been_ended(tmp_path):
    data = gather([leave_run(tmp_path / "mine", status="running")])
    assert "perhaps it was ended" not in render(data)
    data["going"][0]["idle_seconds"] = 4000.0
    assert "1 h 06 min ago: perhaps it was ended" in render(data)


@pytest.mark.slow
def test_a_hundred_long_runs_fit_in_three_megabytes(tmp_path):
    rows, counts = metrics(1000, eval_every=25), ledger(1000, replayed=1)
    folders = []
    for number in range(100):
        folder = leave_run(
            tmp_path / f"run{number}", steps=1000, rows=rows, counts=counts, settings={"learning_rate": number}
        )
        folders.append(folder)
    path = write_report(folders, tmp_path / "report.html")
    assert path.stat().st_size < 3e6


@pytest.mark.slow
def test_twenty_methods_with_five_seeds_fit_in_three_megabytes(tmp_path):
    rows, counts = metrics(1000, eval_every=25), ledger(1000, replayed=1)
    for number in range(100):
        leave_study_run(tmp_path / "s", f"arm{number // 5}", number % 5, steps=1000, rows=rows, counts=counts)
    assert write_report([tmp_path / "s"], tmp_path / "report.html").stat().st_size < 3e6


def test_ticks_are_round_and_their_labels_alike():
    assert figures.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert figures.ticks(0.28, 0.51) == [0.3, 0.35, 0.4, 0.45, 0.5]
    assert figures.ticks(3, 3) == [3]
    assert figures.tick_labels([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert figures.tick_labels([0, 2500, 12_500]) == ["0", "2.5k", "12.5k"]
    assert figures.tick_labels([0, 0.25, 0.5]) == ["0", "0.25", "0.50"]
    assert figures.tick_labels([0, 2_000_000]) == ["0", "2M"]


def test_a_line_lies_where_its_values_are():
    line = figures.Series("a", [0, 10], [0.0, 1.0])
    figure = figures.line_chart("x", "t", "d", [line], x_label="n", y_label="v", from_zero=True)
    left, top, width, height = map(float, re.search(r'data-box="([^"]+)"', figure.svg)[1].split())
    x0, x1, y0, y1 = map(float, re.search(r'data-range="([^"]+)"', figure.svg)[1].split())
    (points,) = re.findall(r'class="line" d="M([^"]+)"', figure.svg)
    found = [tuple(map(float, point.split())) for point in points.split("L")]
    values = [(x0 + (x - left) / width * (x1 - x0), y1 - (y - top) / height * (y1 - y0)) for x, y in found]
    assert values[0] == pytest.approx((0, 0), abs=0.01)
    assert values[1] == pytest.approx((10, 1), abs=0.01)


def test_one_value_everywhere_can_be_drawn():
    line = figures.Series("a", [5.0], [0.0])
    assert "NaN" not in figures.line_chart("x", "t", "d", [line], x_label="n", y_label="v").svg


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(CHROMIUM), reason="needs Debian's chromium")
@pytest.mark.parametrize("window", ["1200,2000", "400,2000"])
def test_chromium_opens_it_without_a_console_error(page, tmp_path, window):
    report, picture = tmp_path / "report.html", tmp_path / "report.png"
    # What the script has to have done says itself: a failure of the check would be an error on the console.
    check = (
        "<script>addEventListener('load',()=>{const chart=document.querySelector('svg[data-kind=lines]');"
        "const box=chart.getBoundingClientRect();const at={bubbles:true,clientY:box.top+box.height/2};"
        "for(let x=box.left;x<box.right;x+=9)chart.dispatchEvent(new PointerEvent('pointermove',{...at,clientX:x}));"
        "const hidden=document.querySelectorAll('.chosen[hidden]').length;"
        "const radio=document.querySelectorAll('[data-choice] input')[1];radio.click();"
        "document.querySelector('[data-arms=none]').click();"
        "console.log('CHECK',hidden,document.getElementById(radio.value).hidden,"
        "document.getElementById('tip').textContent.length>5,document.querySelectorAll('g.s.off').length>2);})</script>"
    )
    report.write_text(page.replace("</body>", check + "</body>"))
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={window}", f"--screenshot={picture}"]
    result = subprocess.run([*words, report.as_uri()], capture_output=True, text=True, timeout=180, check=True)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    assert picture.stat().st_size > 10_000
    assert len(console) == 1, console
    assert re.search(r"CHECK [1-9]\d* false true true", console[0]), console
