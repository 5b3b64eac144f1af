"""`recipes scale report`: each of its files says what the timings say, and opens."""

import csv
import html
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.cli import main
from launch.plots import new_figure
from launch.scaling import report as scale_report
from launch.scaling.report import as_json, file_stems, summary_csv
from launch.scaling.words import commands, find, results, sections, step_parts, suggestions
from recipes.errors import UserError
from recipes.scaling.analyse import analyse
from recipes.scaling.timings import Timing

KINDS = ["epoch_time_detailed", "speedup_efficiency", "throughput", "accuracy", "step_time"]
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
    batch = 32 * (world if scaling == "weak" else 1)
    step = sum(parts.values())
    return Timing(
        num_processes=world,
        epoch_time=step * 100,
        name="bert",
        epoch=epoch,
        samples=batch * 100,
        accuracy=0.9 + epoch / 100,
        recipe=recipe,
        scaling=scaling,
        global_batch=batch,
        micro_batch=batch // world,
        accumulation=1,
        step_time=step,
        no_sync_step=parts["forward"] + parts["backward"] + parts["optimizer"],
        hardware="4 imagined GPUs",
        **parts,
    )


ROWS = [
    timed(recipe, scaling, world, wobble, epoch)
    for (recipe, scaling), worlds in STEPS.items()
    for world in worlds
    for epoch, wobble in enumerate((1.0, 0.98, 1.05))
]


def report(rows, folder, command=""):
    return scale_report.report(find(rows, command), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of two recipes, one of them strong and weak, at three sizes, three times each."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("report")
    report(ROWS, folder, "recipes scale report 'my timings.csv'")
    return folder


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    """Epoch times alone, with names that LaTeX, HTML, matplotlib or file systems would obey."""
    folder = tmp_path_factory.mktemp("odd")
    report([Timing(world, 10 / world, name=name) for name in (ODD, "A", "a") for world in (1, 2)], folder, "x\ny")
    return folder


@pytest.mark.parametrize("form", ["svg", "pdf"])
def test_pictures_come_in_other_formats_beside_png(form, folder, tmp_path):
    scale_report.report(find(ROWS), tmp_path, [form])
    beside = {path.name for path in tmp_path.iterdir()} - {path.name for path in folder.iterdir()}
    assert beside == {f"bert_{kind}.{form}" for kind in KINDS}
    first = (tmp_path / f"bert_accuracy.{form}").read_bytes()
    assert first.startswith(b"%PDF") if form == "pdf" else b"<svg" in first


def test_every_file_is_there(folder):
    assert {path.name for path in folder.iterdir()} == {f"bert_{kind}.png" for kind in KINDS} | set(TABLES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_shows_something(folder, kind):
    from PIL import Image

    with Image.open(folder / f"bert_{kind}.png") as picture:
        assert picture.width == 7 * 300 and picture.height >= 4.5 * 300
        assert len(picture.convert("RGB").getcolors(2**20)) > 50


def test_the_csv_holds_the_numbers_of_the_analysis(folder):
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


def test_the_text_says_band_cause_law_and_numbers(folder):
    text = " ".join((folder / "performance_report.txt").read_text().split())
    assert "0.70 times as fast as 1, 17.6% efficiency: negative scaling (quartiles" in text
    assert "Most of the lost time goes to communication: 190 ms" in text
    assert "Serial fraction 19.0%" in text and "more than 5.25 times as fast" in text
    assert "hardware: 4 imagined GPUs" in text and "written by: recipes scale report 'my timings.csv'" in text
    assert re.search(r"4 +3 25\.20 \[24\.95, 25\.83\] +127\.0 +0\.70 +17\.6% negative scaling communication", text)


def test_advice_comes_with_its_gain_and_its_flags(folder):
    text = " ".join((folder / "performance_report.txt").read_text().split())
    assert (
        "Advice at 4: train on 2, not 4: 1.94 times the throughput (predicted): 2 processes are 1.94 times as fast"
        in text
    )
    assert "--num_processes 2" in text


def test_what_was_measured_here_can_be_tried_here():
    found = find(ROWS, files=["my runs/timings.jsonl"])
    series = found.series[2]
    words = [commands(found, series, size, advice) for size, advice in suggestions(series)]
    tried = "recipes scale run --apply fewer --num_processes 4 --recipe standard --scaling strong --name bert"
    assert words == [["--num_processes 2", f"{tried} --output 'my runs'"]]


def test_predicted_stands_beside_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [("before: log less", 100.0, None), ("log less", 80.0, 1.3)] * 2
    rows = [Timing(2, time, samples=100, applied=applied, predicted=gain) for applied, time, gain in runs]
    report([*ROWS, *rows], tmp_path)
    said = "At 2: log less: predicted 1.30 times the throughput, measured 1.25: within 5%."
    assert said in (tmp_path / "performance_report.txt").read_text()


# --- LaTeX ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "odd_folder"])
def test_the_table_compiles_in_a_plain_article(name, request, tmp_path):
    if not shutil.which("pdflatex"):
        pytest.skip("needs pdflatex")
    shutil.copy(request.getfixturevalue(name) / "summary_table.tex", tmp_path)
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\begin{document}\input{summary_table.tex}\ref{tab:scaling}\end{document}"
    )
    words = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "paper.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout


def test_the_table_holds_a_row_for_each_size(folder):
    table = (folder / "summary_table.tex").read_text()
    assert len(re.findall(r"^\d+ &.*\\\\$", table, flags=re.M)) == 9
    assert r"4 & 25.20 [24.95, 25.83] & 127.0 & 0.70 & 17.6\% & negative scaling & 0.9200 \\" in table


# --- The page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["folder", "odd_folder"])
def test_the_page_refers_to_nothing_but_itself(name, request):
    page = (request.getfixturevalue(name) / "report.html").read_text()
    references = re.findall(r"""\b(?:src|href|action|poster)\s*=\s*["']?([^"']*)""", page)
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    assert "url(" not in page and "@import" not in page and "<script" not in page


def test_the_page_forbids_requests(folder):
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in (folder / "report.html").read_text()


def test_every_picture_of_the_page_says_how_to_read_it(folder):
    alts = re.findall(r'<img alt="([^"]+)"', (folder / "report.html").read_text())
    assert len(alts) == len(KINDS) and all("bert, " in alt for alt in alts)


def test_the_page_begins_with_the_verdicts(folder):
    page = (folder / "report.html").read_text()
    assert page.index("negative scaling") < page.index("<img") < page.index("<caption>bert, fast")


def opened(page, folder, *more):
    """The page as headless Chromium renders it, and the URLs that the page requests."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs chromium")
    log = folder / "net.json"
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --dump-dom"
    words = [browser, *flags.split(), *more, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"]
    done = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=120)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # What the browser asks on its own account, for updates and the time, has no origin.
    asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, asked


@pytest.mark.slow
def test_a_browser_opens_the_page_without_a_request(folder, tmp_path):
    shown, asked = opened(folder / "report.html", tmp_path)
    assert "negative scaling" in shown and not asked


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1400])
@pytest.mark.parametrize("name", ["folder", "odd_folder"])
def test_the_page_is_no_wider_than_its_window(name, width, request, tmp_path):
    page = (request.getfixturevalue(name) / "report.html").read_text()
    measuring = "<script>document.title = document.documentElement.scrollWidth + ' in ' + innerWidth</script>"
    (tmp_path / "page.html").write_text(re.sub("<meta http-equiv[^>]*>", "", page) + measuring)
    shown, _ = opened(tmp_path / "page.html", tmp_path, f"--window-size={width},800")
    wide, window = map(int, re.search(r"<title>(\d+) in (\d+)</title>", shown).groups())
    assert abs(window - width) < 30 and wide <= window


@pytest.mark.slow
def test_a_page_with_a_request_would_be_detected(tmp_path):
    (tmp_path / "page.html").write_text('<img src="http://localhost:9/picture.png">')
    _, asked = opened(tmp_path / "page.html", tmp_path)
    assert asked == {"http://localhost:9/picture.png"}


# --- What people have ----------------------------------------------------------------------------


def test_odd_names_become_files_that_stay_apart(odd_folder):
    pictures = sorted(path.name for path in odd_folder.glob("*_speedup_efficiency.png"))
    stems = ["A", "a-2", "a_b_c_x_y_1_script_é"]
    assert pictures == [f"{stem}_speedup_efficiency.png" for stem in stems]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(), unique=True))
@example(["a", "A", "a-2", "a ", "..", "../.."])
def test_no_name_leaves_the_folder_or_meets_another(names):
    stems = file_stems(names).values()
    assert len({stem.casefold() for stem in stems}) == len(names)
    assert all(stem == Path(stem).name and stem.strip(".") and len(stem.encode()) < 200 for stem in stems)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([Timing(1, 12.5)], ["epoch_time_detailed"]),
        ([Timing(4, 12.5), Timing(4, 13.5)], ["epoch_time_detailed"]),
        ([Timing(1, 10, samples=100)], ["epoch_time_detailed", "throughput"]),
        ([Timing(1, 10), Timing(64, 1)], ["epoch_time_detailed", "speedup_efficiency"]),
        ([Timing(2, 10, applied="before")], []),
    ],
    ids=["one row", "one size", "with samples", "epoch times alone", "no series"],
)
def test_only_pictures_with_numbers_are_drawn(rows, kinds, tmp_path):
    pytest.importorskip("matplotlib")
    written = [path.name for path in report(rows, tmp_path)]
    assert written == [f"training_{kind}.png" for kind in kinds] + TABLES


def test_a_missing_picture_is_listed_with_its_reason(tmp_path):
    pytest.importorskip("matplotlib")
    report([Timing(1, 10), Timing(2, 6)], tmp_path)
    assert "no picture of throughput: needs the column samples" in (tmp_path / "performance_report.txt").read_text()


def test_without_matplotlib_all_but_the_pictures_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert [path.name for path in report(ROWS, tmp_path)] == TABLES
    assert "pip install matplotlib" in (tmp_path / "report.html").read_text()


def test_a_second_report_replaces_the_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report(ROWS, tmp_path)
    report([Timing(1, 10, name="another")], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TABLES)
    assert "bert" not in (tmp_path / "performance_report.txt").read_text()


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report(ROWS, tmp_path / "file")


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture
def timings(tmp_path, monkeypatch):
    """A CSV as people have it; the report is without pictures, which are slow to draw."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "t.csv"
    file.write_text("name,num_processes,epoch_time\nx,1,100\nx,4,28.65\nx,8,108.7\n")
    return file


def test_the_command_prints_verdicts_and_what_it_wrote(timings, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["scale", "report", str(timings), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "4 processes: 3.49 times as fast as 1, 87.3% efficiency: excellent (one timing)." in printed
    assert "8 processes: 0.92 times as fast as 1, 11.5% efficiency: negative scaling (one timing)." in printed
    assert str(output / "report.html") in printed


def test_the_first_epochs_can_be_left_out(timings, tmp_path, capsys):
    timings.write_text("num_processes,epoch_time\n1,300\n1,100\n4,200\n4,50\n")
    assert main(["scale", "report", str(timings), "--warmup", "1", "--output", str(tmp_path / "out")]) == 0
    assert "4 processes: 2.00 times as fast as 1" in capsys.readouterr().out


def test_json_is_all_numbers(timings, tmp_path, capsys):
    assert main(["scale", "report", str(timings), "--output", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["series"][0]["sizes"][1]["speedup"]["median"] == pytest.approx(100 / 28.65)
    assert str(tmp_path / "out" / "report.html") in printed["written"]


# --- Text, page and JSON agree -------------------------------------------------------------------


def test_every_file_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows = [Timing(world, time, samples=1000) for world, time in ((1, 10.0), (4, 3.0), (8, 3.2))]
    found = find(rows)
    report(rows, tmp_path)
    (section,) = sections(found)
    (printed,) = as_json(found)["series"]
    page = html.unescape((tmp_path / "report.html").read_text())
    text = " ".join((tmp_path / "performance_report.txt").read_text().split())
    assert len(section.sentences) == 4 and all(one in text and one in page for one in section.sentences)
    assert [*(size["words"] for size in printed["sizes"]), printed["law_in_words"]] == section.sentences
    (*_, last) = csv.DictReader(io.StringIO(summary_csv(found)))
    assert (last["band"], last["slower_than"], last["best_size"]) == ("negative scaling", "4", "4")


def test_a_table_of_runs_is_not_called_one_of_epochs():
    rows = [Timing(world, 10 / world, samples=100, timed="20 steps") for world in (1, 2)]
    assert "20 steps (s)" in results(find(rows).series[0]).cells


def test_a_table_leaves_out_what_was_not_measured():
    assert [*step_parts(find([Timing(1, 10)]).series[0]).cells] == ["processes"]


def test_negative_scaling_is_marked_and_named_once(monkeypatch):
    from launch.scaling import plots

    drawn = []
    monkeypatch.setattr(plots, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    slow = [series for series in analyse(ROWS) if series.recipe == "standard"]
    plots.pictures("bert", slow, [])
    labels = [text.get_text() for text in drawn[1].legends[0].get_texts()]
    crosses = [line for line in drawn[1].axes[0].lines if line.get_marker() == "x"]
    assert labels == ["standard", "negative scaling", "ideal"]
    assert [list(cross.get_xdata()) for cross in crosses] == [[4]]
