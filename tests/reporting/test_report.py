"""The files of a report, its command line, and that it is complete and stands alone."""

import csv
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import raises
from reporting.fakes import H200, TRACE, failed, result, rich_sweep, write_run, write_sweep

from fusedmlp.errors import UserError
from fusedmlp.reporting import report
from fusedmlp.reporting.__main__ import main
from fusedmlp.reporting.plots import amount
from fusedmlp.reporting.tables import digits

ROOT = Path(__file__).parents[2]
FILES = {"results.csv", "report.md", "report.html", "throughput.png"}


def test_a_report_has_every_run_with_its_numbers_or_its_reason(tmp_path):
    sweep = rich_sweep(tmp_path / "sweep")
    written = report.write([sweep], sweep)
    assert {file.name for file in sweep.iterdir() if file.is_file()} == FILES | {"sweep.json"}
    assert written.state == "51 runs: 49 completed, 1 failed, 1 waiting"
    markdown, page = (sweep / "report.md").read_text(), (sweep / "report.html").read_text()
    for text in (markdown, re.sub("<[^>]+>", "", page)):
        assert "triton wins, 1.25 times native" in text
        assert TRACE["sentence"] in text
        assert "no, +6.67 %" in text
        assert "580.159.04" in text
        assert "python train.py -m impl=manual,native,triton dim=512,1024" in text
    assert "| triton | 8.08 | 8.00 to 8.16 | 123,762 |" in markdown
    assert "nvcc 12.9 is needed <and> was not found" in markdown
    assert "nvcc 12.9 is needed &lt;and&gt; was not found" in page
    with open(sweep / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 51
    assert [row["status"] for row in rows].count("completed") == 49
    (bad,) = (row for row in rows if row["status"] == "failed")
    assert (bad["impl"], bad["dim"]) == ("cuda", "512")
    assert bad["reason"] == "impl=cuda cannot run here: nvcc 12.9 is needed <and> was not found"
    third = next(row for row in rows if (row["impl"], row["dim"], row["repeat"]) == ("triton", "512", "3"))
    assert float(third["step_ms_median"]) == pytest.approx(8.16)
    assert float(third["times_native"]) == pytest.approx(1.25)
    assert (third["loss_agrees"], third["launches_per_step"]) == ("True", "1420.0")


class Page(HTMLParser):
    """What a page refers to, and its ids."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self, text: str):
        super().__init__()
        self.references, self.ids, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(tmp_path):
    sweep = rich_sweep(tmp_path / "sweep")
    report.write([sweep], sweep)
    text = (sweep / "report.html").read_text()
    page = Page(text)
    assert page.open == [], "every element is closed"
    assert text.count("<svg") == 4
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= set(page.ids)
    assert {name for name in re.findall(r"url\(#([^)]+)\)", text)} <= set(page.ids)  # noqa: C416
    assert "@import" not in text


def test_machines_and_commits_are_side_by_side(tmp_path):
    steps = {"native": 10.0, "triton": 8.0}
    for name, factor, gpu in (("a", 1.0, "NVIDIA H200"), ("b", 2.0, "NVIDIA A100")):
        runs = [
            result(impl, step_ms=factor * ms * scale, environment=H200 | {"gpu": gpu})
            for scale in (1.0, 1.01)
            for impl, ms in steps.items()
        ]
        write_sweep(tmp_path / name, [*runs, failed("cuda", environment=H200 | {"gpu": gpu})])
    written = report.write([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    table = written.comparison
    assert table.heading == "A: NVIDIA H200, 012345678; B: NVIDIA A100, 012345678"
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["mlp, dim 512", "native", "10.1", "20.1", "2.00 (slower)"],
        ["mlp, dim 512", "triton", "8.04", "16.1", "2.00 (slower)"],
        ["mlp, dim 512", "cuda", "-", "-", "-"],
    ]
    assert "## Side by side" in (tmp_path / "out" / "report.md").read_text()
    assert [sentence.partition(":")[0] for sentence in written.verdicts] == [
        "NVIDIA H200, 012345678", "NVIDIA A100, 012345678",
    ]  # fmt: skip
    again = report.write([tmp_path / "a"], tmp_path / "out")
    assert again.comparison is None
    assert "Side by side" not in (tmp_path / "out" / "report.md").read_text()


def test_a_sweep_of_which_nothing_has_begun(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [], waiting=2)
    written = report.write([sweep], sweep)
    assert (written.title, written.state, written.verdicts) == ("nothing has begun", "2 runs: 2 waiting", [])


@pytest.mark.parametrize(
    "runs",
    [
        [failed("triton")],
        [result("native", throughput=None, final_train_loss=None, peak_memory_gib=None)],
        [result("native", 512), result("native", 1024), result("sixth", 512)],
        [
            result("native", trace={"sentence": "no kernels"}),
            result("cuda", trace={"time_by_kind_ms": {"new kind": 1.0}}),
        ],
        [result("native", trace={"kinds": {"GEMM": {"ms": 1.0, "percent": 100.0}}, "gpu_busy_percent": 0.0})],
        [result("native", "default"), result("native", 64)],
    ],
)
def test_a_report_is_made_of_whatever_there_is(tmp_path, runs):
    sweep = write_sweep(tmp_path / "sweep", runs)
    assert len(report.write([sweep], sweep).verdicts) >= 1


def test_a_column_is_there_when_something_is_known_of_it(tmp_path):
    write_run(tmp_path / "a" / "a", result("native"))
    heads = [column.head for column in report.build([tmp_path / "a"]).tables[0][1][0].columns]
    assert "captured" not in heads
    assert "why" not in heads
    write_run(tmp_path / "a" / "b", result("triton", cuda_graph={"captured": True}))
    write_run(tmp_path / "a" / "c", result("cuda", cuda_graph={"captured": False}))
    table = report.build([tmp_path / "a"]).tables[0][1][0]
    at = [column.head for column in table.columns].index("captured")
    assert [row[at].text for row in table.rows] == ["-", "yes", "no"]


def test_random_bytes_are_said_to_prove_nothing(tmp_path):
    write_run(tmp_path / "a", result("native"), data={"source": "synthetic"})
    assert any("cannot be learnt" in note for note in report.build([tmp_path]).notes)
    write_run(tmp_path / "b" / "c", result("native"))
    assert not any("cannot be learnt" in note for note in report.build([tmp_path / "b"]).notes)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "a", [result("native")])
    write_run(tmp_path / "b", result("triton"))
    assert main(["a"]) == 0
    assert capsys.readouterr().out.endswith("report     a/report.html\n")
    assert main(["a", "b"]) == 0
    assert capsys.readouterr().out.startswith("2 runs: 2 completed\n\nmlp, dim 512: native was fastest, 1.00 times")
    assert {file.name for file in (tmp_path / "report").iterdir()} >= FILES
    assert main(["a", "--out", "deep/er"]) == 0
    assert {file.name for file in (tmp_path / "deep" / "er").iterdir()} == FILES
    (tmp_path / "file").touch()
    assert main(["a", "--out", "file"]) == 1
    assert capsys.readouterr().err == "error: the report cannot be written to file: File exists\n"
    assert main(["deep"]) == 1
    assert capsys.readouterr().err.startswith("error: deep holds no run")


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fusedmlp.reporting"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "DIR" in done.stderr


def test_half_a_report_is_never_left(tmp_path, monkeypatch):
    from fusedmlp.reporting import html

    sweep = write_sweep(tmp_path / "sweep", [result("native")])

    def broken(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(html, "render", broken)
    with raises(UserError, "No space left on device"):
        report.write([sweep], sweep)
    assert {file.name for file in sweep.iterdir() if file.is_file()} == {"sweep.json"}
    assert not list(sweep.glob(".report-*"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (0.02, "0.0200"), (12.0, "12.0"), (8.16, "8.16"), (123.4, "123"), (12345.6, "12,346"),
     (0, "0"), (10.049, "10.0"), (9.999, "10.0"), (1e-9, "1e-09")],
)  # fmt: skip
def test_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(("value", "text"), [(950.0, "950"), (12345.0, "12.3k"), (4.56e6, "4.56M"), (0.5, "0.5")])
def test_amounts_on_an_axis(value, text):
    assert amount(value) == text
