"""`recipes scale report`: each of its files says what the timings say, and opens."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.scaling import report as scale_report
from launch.scaling.report import file_stems, find, sections
from recipes.errors import UserError
from recipes.scaling.analyse import analyse
from recipes.scaling.timings import Timing

KINDS = ["epoch_time_detailed", "speedup_efficiency", "accuracy", "step_time"]
TABLES = ["comprehensive_summary.csv", "summary_table.tex", "performance_report.txt", "report.html"]
ODD = "a/b_c% $x$ & \\{y} #1 ~^ <script>\"'| é"
# Seconds of a step's parts: data_wait, forward, backward, communication, optimizer.
STEPS = {
    ("fast", "strong"): {1: (2, 50, 100, 0, 8), 2: (2, 26, 52, 4, 8), 4: (3, 14, 28, 12, 8)},
    ("standard", "strong"): {1: (4, 55, 110, 0, 8), 2: (4, 28, 60, 30, 8), 4: (6, 15, 33, 190, 8)},
    ("fast", "weak"): {1: (2, 50, 100, 0, 8), 2: (2, 50, 105, 6, 8), 4: (3, 52, 110, 15, 8)},
}


def timed(recipe, scaling, world, wobble, epoch):
    names = ("data_wait", "forward", "backward", "communication", "optimizer")
    parts = {name: ms * wobble / 1000 for name, ms in zip(names, STEPS[recipe, scaling][world], strict=True)}
    batch, step = 32 * (world if scaling == "weak" else 1), sum(parts.values())
    labels = {"name": "bert", "recipe": recipe, "scaling": scaling, "hardware": "4 imagined GPUs"}
    sizes = {"samples": batch * 100, "global_batch": batch, "micro_batch": batch // world, "accumulation": 1}
    no_sync = parts["forward"] + parts["backward"] + parts["optimizer"]
    times = {"epoch_time": step * 100, "step_time": step, "no_sync_step": no_sync, **parts}
    return Timing(num_processes=world, epoch=epoch, accuracy=0.9 + epoch / 100, **labels, **sizes, **times)


ROWS = [
    timed(recipe, scaling, world, wobble, epoch)
    for (recipe, scaling), worlds in STEPS.items()
    for world in worlds
    for epoch, wobble in enumerate((1.0, 0.98, 1.05))
]


def report(rows, folder, command="", formats=()):
    return scale_report.report(find(rows, command), folder, formats)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of two recipes, one of them strong and weak, at three sizes, three times each."""
    folder = tmp_path_factory.mktemp("report")
    report(ROWS, folder, "recipes scale report 'my timings.csv'", ["svg", "pdf"])
    return folder


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    """Epoch times alone, with names that LaTeX, HTML, matplotlib or file systems would obey."""
    folder = tmp_path_factory.mktemp("odd")
    report([Timing(world, 10 / world, name=name) for name in (ODD, "A", "a") for world in (1, 2)], folder, "x\ny")
    return folder


@pytest.fixture
def unpictured(monkeypatch):
    """Without pictures, which are slow to draw."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_scale_report_writes_every_table_and_plot_and_no_plot_is_blank(folder):
    from PIL import Image

    pictures = {f"bert_{kind}.{form}" for kind in KINDS for form in ("png", "svg", "pdf")}
    assert {path.name for path in folder.iterdir()} == pictures | set(TABLES)
    for kind in KINDS:
        with Image.open(folder / f"bert_{kind}.png") as picture:
            assert picture.width == 7 * 300 and picture.height >= 4.5 * 300
            assert len(picture.convert("RGB").getcolors(2**20)) > 50
        assert (folder / f"bert_{kind}.pdf").read_bytes().startswith(b"%PDF")
        assert b"<svg" in (folder / f"bert_{kind}.svg").read_bytes()


def test_comprehensive_summary_csv_holds_the_numbers_of_the_scaling_analysis(folder):
    with (folder / "comprehensive_summary.csv").open(newline="") as stream:
        rows = {(row["recipe"], row["scaling"], int(row["num_processes"])): row for row in csv.DictReader(stream)}
    assert len(rows) == 9
    for series in analyse(ROWS):
        for size in series.sizes:
            row = rows[series.recipe, series.scaling, size.num_processes]
            assert float(row["speedup"]) == size.speedup.median
            assert float(row["efficiency_low_quartile"]) == size.efficiency.low
            assert float(row["communication"]) == size.typical.communication
            assert (row["band"], row["cause"] or None) == (size.band, size.cause)
            best = (str(size.slower_than or ""), series.best.num_processes)
            assert (row["slower_than"], int(row["best_size"])) == best


def test_the_text_report_says_verdict_cause_serial_fraction_numbers_and_advice(folder):
    text = " ".join((folder / "performance_report.txt").read_text().split())
    assert "0.70 times as fast as 1 process, 17.6% efficiency: negative scaling (quartiles" in text
    assert "Most of the lost time goes to communication: 190 ms" in text
    assert "Serial fraction 19.0%" in text and "more than 5.25 times as fast" in text
    assert "hardware: 4 imagined GPUs" in text and "written by: recipes scale report 'my timings.csv'" in text
    assert re.search(r"4 +3 25\.20 \[24\.95, 25\.83\] +127\.0 +0\.70 +17\.6% negative scaling communication", text)
    gain = "1.94 times the throughput (predicted): 2 processes are 1.94 times as fast"
    assert f"Advice for 4 processes: train on 2, not 4: {gain}" in text and "--num_processes 2" in text


def test_advice_comes_with_the_scale_run_command_that_tries_it():
    found = sections(find(ROWS, files=["my runs/timings.jsonl"]))[2]
    words = [commands for _, commands in found.advice]
    tried = "recipes scale run --apply fewer --num_processes 4 --recipe standard --scaling strong --name bert"
    assert words == [["--num_processes 2", f"{tried} --output 'my runs'"]]


# --- LaTeX and the page ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "odd_folder"])
def test_the_latex_table_compiles_in_a_plain_article(name, request, tmp_path):
    if not shutil.which("pdflatex"):
        pytest.skip("needs pdflatex")
    shutil.copy(request.getfixturevalue(name) / "summary_table.tex", tmp_path)
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\begin{document}\input{summary_table.tex}\ref{tab:scaling}\end{document}"
    )
    words = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "paper.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout


def test_the_latex_table_has_a_row_for_each_number_of_processes(folder):
    table = (folder / "summary_table.tex").read_text()
    assert len(re.findall(r"^\d+ &.*\\\\$", table, flags=re.M)) == 9
    assert r"4 & 25.20 [24.95, 25.83] & 127.0 & 0.70 & 17.6\% & negative scaling & 0.9200 \\" in table


@pytest.mark.parametrize("name", ["folder", "odd_folder"])
def test_the_html_report_loads_nothing_external_and_its_csp_forbids_requests(name, request):
    page = (request.getfixturevalue(name) / "report.html").read_text()
    references = re.findall(r"""\b(?:src|href|action|poster)\s*=\s*["']?([^"']*)""", page)
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    assert "url(" not in page and "@import" not in page and "<script" not in page
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page


def test_the_html_report_begins_with_the_verdicts_and_each_picture_has_an_alt_text(folder):
    page = (folder / "report.html").read_text()
    assert page.index("negative scaling") < page.index("<img") < page.index("<caption>bert, fast")
    alts = re.findall(r'<img alt="([^"]+)"', page)
    assert len(alts) == len(KINDS) and all("bert, " in alt for alt in alts)


# --- What people have ----------------------------------------------------------------------------


def test_training_names_with_special_characters_become_distinct_file_names(odd_folder):
    pictures = sorted(path.name for path in odd_folder.glob("*_speedup_efficiency.png"))
    stems = ["A-2", "a-3", "a_b_c_x_y_1_script_é"]
    assert pictures == [f"{stem}_speedup_efficiency.png" for stem in stems]
    names = ["a", "A", "a ", "..", "../..", "漢" * 300]
    found = file_stems(names).values()
    assert len({stem.casefold() for stem in found}) == len(names)
    assert all(stem == Path(stem).name and stem.strip(".") and len(stem.encode()) < 200 for stem in found)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [([Timing(4, 12.5), Timing(4, 13.5)], ["epoch_time_detailed"]), ([Timing(2, 10, applied="before")], [])],
    ids=["one size", "no series"],
)
def test_the_scale_report_draws_only_plots_that_have_data(rows, kinds, tmp_path):
    written = [path.name for path in report(rows, tmp_path)]
    assert written == [f"training_{kind}.png" for kind in kinds] + TABLES


def test_scale_report_without_matplotlib_replaces_an_earlier_report_by_one_without_plots(unpictured, tmp_path):
    runs = [("before: log less", 100.0, None), ("log less", 80.0, 1.3)] * 2
    rows = [Timing(2, time, samples=100, applied=applied, predicted=gain) for applied, time, gain in runs]
    assert [path.name for path in report([*ROWS, *rows], tmp_path)] == TABLES
    said = "2 processes: log less: predicted 1.30 times the throughput, measured 1.25: within 5%."
    assert said in (tmp_path / "performance_report.txt").read_text()
    assert "pip install matplotlib" in (tmp_path / "report.html").read_text()
    report([Timing(1, 10, name="another")], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TABLES)
    assert "bert" not in (tmp_path / "performance_report.txt").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report(ROWS, tmp_path / "file")


def test_scale_report_prints_the_verdicts_and_the_path_of_the_html_report(unpictured, tmp_path, capsys):
    file, output = tmp_path / "t.csv", tmp_path / "out"
    file.write_text("name,num_processes,epoch_time\nx,1,100\nx,4,28.65\nx,8,108.7\n")
    words = ["scale", "report", str(file), "--output", str(output)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "4 processes: 3.49 times as fast as 1 process, 87.3% efficiency: excellent (one timing)." in printed
    assert "8 processes: 0.92 times as fast as 1 process, 11.5% efficiency: negative scaling (one timing)." in printed
    assert str(output / "report.html") in printed


@pytest.fixture
def figures(monkeypatch):
    """Draws the pictures of some recipes; returns matplotlib's figures."""
    from matplotlib import figure

    from launch.scaling import plots

    def draw(*names):
        drawn, real = [], figure.Figure
        with monkeypatch.context() as patch:
            patch.setattr(figure, "Figure", lambda **named: drawn.append(real(**named)) or drawn[-1])
            plots.pictures("bert", [series for series in analyse(ROWS) if series.recipe in names], [])
        return drawn

    return draw


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_plot_of_accuracy_has_a_curve_through_the_best_accuracy_of_each_number_of_gpus(figures):
    assert [0.92] * 3 in [list(line.get_ydata()) for line in figures("standard")[2].axes[0].lines]


def test_the_legend_names_the_scaling_if_a_plot_has_strong_and_weak_scaling(figures):
    assert {"standard, strong scaling", "fast, weak scaling"} <= {*labels(figures("standard", "fast")[1])}


def test_a_plot_marks_negative_scaling_with_a_cross_and_names_it_once_in_the_legend(figures):
    figure = figures("standard")[1]
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert labels(figure) == ["standard", "negative scaling", "ideal"]
    assert [list(cross.get_xdata()) for cross in crosses] == [[4]]
