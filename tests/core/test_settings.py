"""Settings as version 0.1 saved them."""

from __future__ import annotations

from zmqtrain.core.settings import RunSettings


def test_settings_that_version_0_1_saved_are_read_under_their_present_names() -> None:
    saved = RunSettings(shards=3, start_nodes=1, initial="founder").to_dict()
    saved["masters"] = saved.pop("shards")
    assert RunSettings.from_dict(saved).shards == 3
