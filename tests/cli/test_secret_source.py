"""The secret of a run: where its launchers have it from."""

from __future__ import annotations

import os

import pytest

from dslc.launching import secret_source
from dslc.launching.secret_source import given_secret


def test_a_token_of_the_environment_is_of_each_meeting_and_no_user_code_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dslc calibrate --rendezvous` meets once for each plan that it measures."""
    monkeypatch.setattr(secret_source, "_token", "")
    monkeypatch.setenv("DSLC_RUN_TOKEN", "0123456789abcdef")
    for _ in range(2):
        assert given_secret(None).token == b"0123456789abcdef"
        assert "DSLC_RUN_TOKEN" not in os.environ
    monkeypatch.setattr(secret_source, "_token", "")
    assert given_secret(None).is_empty
