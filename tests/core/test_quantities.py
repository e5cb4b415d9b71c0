"""What people type for counts, memory and links, and what they are told where it cannot be read."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import parse_bytes, parse_count, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_count, "100M", 100_000_000),
        (parse_count, "1.3B", 1_300_000_000),
        (parse_count, "25e6", 25_000_000),
        (parse_count, " 7 ", 7),
        (parse_bytes, "6GB", 6_000_000_000),
        (parse_bytes, "512 mb", 512_000_000),
        (parse_bytes, "4k", 4000),
        (parse_bytes, "100b", 100),
        (parse_rate, "1gbit", 10**9),
        (parse_rate, "2.5 Gbit/s", 2_500_000_000),
        (parse_rate, "100mbit", 10**8),
        (parse_rate, "1e9", 10**9),
        (parse_rate, "10Gbps", 10**10),
        (parse_rate, "100Mb/s", 10**8),
        (parse_rate, "12.5MB/s", 10**8),
        (parse_rate, "125 MB", 10**9),
        (parse_duration, "60s", 60.0),
        (parse_duration, "1.5 min", 90.0),
        (parse_duration, "1h", 3600.0),
        (parse_duration, "250ms", 0.25),
    ],
)
def test_a_quantity_is_read_as_people_write_it(read, text, value):
    assert read(text) == value


def test_an_amount_of_memory_without_a_unit_is_not_taken_for_bytes():
    with pytest.raises(ConfigError, match=r"memory is written like 6GB, .* not '6': that would be 6 bytes; 6GB"):
        parse_bytes("6", "memory")
    assert parse_bytes("6000000000") == parse_bytes("6e9") == parse_bytes("6GB")


@pytest.mark.parametrize("read", [parse_count, parse_bytes, parse_rate])
@pytest.mark.parametrize("text", ["", "fast", "-1", "0", "1 2", "1e999", "nan", "1xb", "1gbi"])
def test_what_is_no_quantity_is_refused_with_how_it_is_written(read, text):
    with pytest.raises(ConfigError, match=r"^the thing is written like .*, not "):
        read(text, "the thing")


def test_a_time_without_a_unit_is_not_guessed():
    with pytest.raises(ConfigError, match="a time is written like 60s, 5min or 1h, not '60'"):
        parse_duration("60")
