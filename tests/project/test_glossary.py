"""The glossary: every word once, with a definition and the words that it replaces."""

from __future__ import annotations

import re

from tests import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^### (.+)\n\n((?:(?!#).*\n)+)", GLOSSARY, re.MULTILINE)
PROMISED = """stage, micro-batch, partition, balance, schedule, action, saved tensors, recomputation, all-reduce,
broadcast, rendezvous, barrier, rank, chief, worker, replica, shard, checkpoint, position, run, step, epoch, strategy,
trainer"""


def test_every_word_has_one_entry_of_a_few_sentences() -> None:
    words = [word for word, _ in ENTRIES]
    assert words == re.findall(r"^### (.+)", GLOSSARY, re.MULTILINE)
    assert len(words) == len(set(words))
    assert set(re.split(r",\s+", PROMISED)) <= set(words)
    for word, text in ENTRIES:
        assert 20 < len(text.split("\n\nNot:")[0]) < 400, word


def test_no_entry_forbids_its_own_word() -> None:
    for word, text in ENTRIES:
        _, _, forbidden = text.partition("\n\nNot: ")
        assert word not in re.split(r", |\. ", forbidden.strip().split(". ")[0].rstrip(".")), word
