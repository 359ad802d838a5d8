"""Tests, in the folders of what they test; `support` has what they share."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
