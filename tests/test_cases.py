"""Faults reported of similar systems: each, by its number, has a test of that name."""

import pathlib
import re

# Numbers 1 to 22; this one comes with persistent residuals (they survive a change of
# the number of ranks).
LATER = {22}


def test_every_case_has_a_test_with_its_number_in_the_name():
    files = pathlib.Path(__file__).parent.rglob("test_*.py")
    names = [n for f in files for n in re.findall(r"def (test_\w+)", f.read_text())]
    found = {int(number) for number in re.findall(r"_c(\d\d)(?=_)", " ".join(names))}
    assert set(range(1, 23)) - LATER <= found
