"""A measured number in a text has a JSON line as its source, and equals it."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import results  # noqa: E402

TEXTS = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("docs/howto/*.md")]
)
NAMES = [str(path.relative_to(ROOT)) for path in TEXTS]

# What a measured figure looks like: a number with one of these after it.
_MEASURED = re.compile(
    r"\d(?:\.\d+)?\s?(?:%|x\b(?!\d)|ms\b|µs\b|GB/s|TB/s|points\b|times\b)"
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", re.DOTALL)
_GENERATED = re.compile(r"<!-- results: .*?<!-- end results -->", re.DOTALL)
_MARKED = re.compile(r"[-+]?\d[\d,.]*\s*(?:%|x|points|ms)?\**\s*<!-- result: [^>]*-->")
# Not measured: they follow from the definitions, and have tests of their own.
_EXACT = ("Eight bits make it 17 times smaller",)


@pytest.mark.parametrize("name", NAMES)
def test_marked_figures_equal_their_lines(name):
    for written, file, keys in results.markers((ROOT / name).read_text()):
        figure = results.figure(results.RESULTS, file, keys)
        assert figure is not None, f"{written}: no line of {file} has {keys}"
        assert results.as_written(figure, written) == written, keys


@pytest.mark.parametrize("name", NAMES)
def test_no_measured_figure_without_a_source(name):
    text = (ROOT / name).read_text()
    for pattern in (_GENERATED, _CODE, _MARKED):
        text = pattern.sub(" ", text)
    for sentence in _EXACT:
        text = text.replace(sentence, " ")
    # A row that links to where its figure stands has a source.
    lines = [line for line in text.splitlines() if "](http" not in line]
    assert not [line for line in lines if _MEASURED.search(line)]


def test_the_rules_above_notice_what_they_should():
    marked = "is **1.25**<!-- result: a.jsonl metric=m bits=4 --> of"
    assert list(results.markers(marked)) == [
        ("1.25", "a.jsonl", {"metric": "m", "bits": "4"})
    ]
    assert _MEASURED.search("took 3.2 ms")
    assert _MEASURED.search("was 0.4 % better")
    assert not _MEASURED.search(_MARKED.sub(" ", "was 2.0x<!-- result: a b=c --> so"))
    assert results.as_written(0.0354, "+0.04") == "+0.04"
    assert results.as_written(1234.5, "1,234") == "1,234"


def test_generated_tables_of_the_readme_are_up_to_date():
    text = (ROOT / "README.md").read_text()
    assert results.with_tables(text, results.RESULTS) == text


def test_pages_and_pictures_are_made_from_lines_alone(tmp_path):
    import pictures

    results.write_page(results.RESULTS, tmp_path / "results.md")
    page = (tmp_path / "results.md").read_text()
    assert "| 4 bits, feedback, float32 residual |" in page
    results.write_page(tmp_path, tmp_path / "empty.md")
    empty = (tmp_path / "empty.md").read_text()
    assert empty.count(results.NOTHING) == len(results.SECTIONS)
    pictures.write_all(results.RESULTS, tmp_path)
    pictures.write_all(tmp_path, tmp_path / "empty")
    assert len(list(tmp_path.glob("*.svg"))) == 6
    assert len(list(tmp_path.glob("empty/*.svg"))) == 6
