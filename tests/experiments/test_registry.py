"""The registry of studies, and the promise that naming them costs nothing."""

import importlib

import pytest

from experiments.registry import STUDIES, get_study


def test_every_study_has_a_question_and_a_module_that_runs():
    assert set(STUDIES) == {"compress-ratio", "decoder-replay", "speculation"}
    for name, study in STUDIES.items():
        assert study.name == name and study.question.endswith("?")
        module = importlib.import_module(study.module)
        assert callable(module.run) and module.__doc__.startswith(study.question)


def test_an_unknown_study_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"study='compress' is unknown: must be one of compress-ratio, decoder"):
        get_study("compress")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode='slow' must be one of quick, default, full"):
        get_study("compress-ratio").run("slow", None, print)
