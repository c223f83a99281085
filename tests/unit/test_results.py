# SPDX-License-Identifier: Apache-2.0
"""Result files have the format that tables and pages are made from, and the tables are made from them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from ub_dynamic.testing.results import commit, write_result

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["name", "date", "command", "commit", "machine", "versions", "mode", "figures", "rows"]


@pytest.fixture
def make_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "benchmarks" / "make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written(tmp_path: Path) -> None:
    path = write_result("demo", {"loss": 0.5, "steps": 3}, [{"T": 8}], mode="cpu-mpi", folder=tmp_path)
    record = json.loads(path.read_text())
    assert path == tmp_path / "demo.json"
    assert list(record) == KEYS
    assert record["figures"] == {"loss": 0.5, "steps": 3}
    assert record["rows"] == [{"T": 8}]
    assert record["commit"] == commit()
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|unknown", record["commit"])
    assert record["versions"].keys() >= {"python", "torch"}
    assert record["command"].startswith("python ")
    assert str(ROOT) not in path.read_text()


@pytest.mark.parametrize(
    ("name", "figures", "mode", "says"),
    [
        ("A b", {}, "cpu-mpi", "name 'A b'"),
        ("a", {}, "cpu", "mode 'cpu'"),
        ("a", {}, "one-gpu-0-ranks", "mode 'one-gpu-0-ranks'"),
        ("a", {"x": math.nan}, "2-gpus", "figure 'x' is nan"),
        ("a", {"x": True}, "2-gpus", "figure 'x' is True"),
        ("a", {"x": "1"}, "2-gpus", "figure 'x' is '1'"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, figures: dict, mode: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write_result(name, figures, mode=mode, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_tables_are_filled(tmp_path: Path, make_tables: ModuleType) -> None:
    rows = [{"T": 8, "ms": 1.23456}, {"T": 16, "ms": 20000.4}]
    write_result("demo", {"loss": 0.123456, "steps": 30000}, rows, mode="cpu-mpi", folder=tmp_path)
    text = make_tables.render(
        "<!-- rows: demo ms, T -->\nold<!-- end --> and <!-- rows: demo --><!-- end -->", tmp_path
    )
    assert "| ms | T |\n| --- | --- |\n| 1.235 | 8 |\n| 20,000 | 16 |" in text
    assert "| T | ms |" in text
    assert "old" not in text
    assert make_tables.render(text, tmp_path) == text
    assert "| steps | 30,000 |" in make_tables.render("<!-- figures: demo --><!-- end -->", tmp_path)
    figure = "<!-- figure: demo loss -->{}<!-- end -->"
    assert make_tables.render(figure.format(""), tmp_path) == figure.format("0.1235")


def test_every_result_is_shown(tmp_path: Path, make_tables: ModuleType) -> None:
    for name, value in (("b_two", 2), ("a_one", 1)):
        write_result(name, {"value": value}, mode="1-gpus", folder=tmp_path)
    text = make_tables.render("<!-- results -->old<!-- end -->", tmp_path)
    assert "old" not in text
    assert text.index("### a_one") < text.index("| value | 1 |") < text.index("### b_two") < text.index("| value | 2 |")


def test_a_picture_is_shown_once_there_is_its_result(tmp_path: Path, make_tables: ModuleType) -> None:
    marker = "<!-- picture: demo pictures/demo.svg Time against T: dynamic, padded --><!-- end -->"
    assert make_tables.render(marker, tmp_path) == marker
    write_result("demo", {"loss": 0.5}, mode="cpu-mpi", folder=tmp_path)
    shown = make_tables.render(marker, tmp_path)
    assert "\n![Time against T: dynamic, padded](pictures/demo.svg)\n" in shown and "cpu-mpi" in shown
    assert make_tables.render(shown, tmp_path) == shown


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("rows: gone", "gone.json"),
        ("rows: demo x", "no 'x'; it has T"),
        ("figure: demo y", "no 'y'; it has loss"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, make_tables: ModuleType, marker: str, says: str) -> None:
    write_result("demo", {"loss": 0.5}, [{"T": 8}], mode="cpu-mpi", folder=tmp_path)
    with pytest.raises(KeyError, match=says):
        make_tables.render(f"<!-- {marker} --><!-- end -->", tmp_path)


def test_shown_tables_agree_with_the_results(make_tables: ModuleType) -> None:
    """benchmarks/README.md and README.md show what the result files hold."""
    assert make_tables.main(["--check"]) == 0


def test_shown_pictures_exist(make_tables: ModuleType) -> None:
    """With te_step.json its pictures have to be drawn: make_tables.py does it."""
    for page in make_tables.pages():
        shown = re.findall(r"!\[[^]]*\]\((?!https?:)([^)]+)\)", page.read_text())
        assert not [picture for picture in shown if not (page.parent / picture).exists()], page


def test_results_have_the_format() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text())
        assert set(KEYS) <= record.keys(), path.name
        assert record["name"] == path.stem
        assert all(math.isfinite(value) for value in record["figures"].values()), path.name
