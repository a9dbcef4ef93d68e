"""Fixtures that more than one subject needs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cross_encoder_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT cross-encoder with one label and 128 positions, read only."""
    from tests import checkpoints  # torch: only the tests that ask for it wait for its import

    return checkpoints.tiny_cross_encoder(tmp_path_factory.mktemp("cross_encoder"))
