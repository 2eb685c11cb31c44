"""The checkpoint shipped with the package."""

import importlib.util

import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.model_config import read_model_config
from equipoise.formats.packaged import packaged_checkpoint


def test_it_is_a_folder_with_a_model():
    assert read_model_config(packaged_checkpoint() / "config.json").num_experts == 32


def test_where_it_was_left_out_a_folder_must_be_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FormatError, match=r"name the folder of a model with --checkpoint, or"):
        packaged_checkpoint()
