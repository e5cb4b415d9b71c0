"""Parameters that are given away to each step, and parameters that are kept."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["donated", "kept"])
def donate(request):
    return request.param
