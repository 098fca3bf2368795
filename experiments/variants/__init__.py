"""Sums whose wire format the library does not have, to see what it would be worth."""
