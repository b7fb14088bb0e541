import io

import pytest
from report_helpers import leave_run
from rich.console import Console
from typer.testing import CliRunner

from rollwise.commands.app import app
from rollwise.commands.report import report
from rollwise.usage import UsageError


def test_a_run_gets_its_page_beside_it(tmp_path):
    folder = leave_run(tmp_path / "mine")
    console = Console(file=io.StringIO(), width=80)
    path = report([folder, folder], console=console)
    assert path == folder / "report.html"
    assert "<title>mine - Rollwise report</title>" in path.read_text()
    assert "holds the report" in console.file.getvalue()
    assert not list(tmp_path.rglob("*.partial"))


def test_several_get_one_page_here_or_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [leave_run(tmp_path / name, settings={"learning_rate": len(name)}) for name in ("a", "bb")]
    result = CliRunner().invoke(app, ["report", *map(str, folders)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").is_file()
    result = CliRunner().invoke(
        app, ["report", *map(str, folders), "--output", "sub/x.html", "--baseline", "bb", "--target", "0.4"]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "sub" / "x.html").read_text()
    assert "bb (baseline)" in page
    assert "accuracy of 0.400" in page
    (tmp_path / "pages").mkdir()
    assert report(folders, output=tmp_path / "pages", console=Console(file=io.StringIO())).name == "report.html"


def test_mistakes_are_one_line_and_write_nothing(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "x.html")])
    assert result.exit_code == 2
    assert not (tmp_path / "x.html").exists()
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 2


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("rollwise.usage.missing_extra", lambda *modules, extra: f"{modules} {extra}")
    with pytest.raises(UsageError, match=r"jinja2.*report"):
        report([tmp_path])
