"""How nodes train in lockstep, as people type it."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.synchronous import Allreduce, Server, synchronous_from_spec


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("hub", None),
        ("allreduce", Allreduce()),
        ("allreduce:ring", Allreduce("ring")),
        ("allreduce:ring,size=4", Allreduce("ring", 4)),
        ("allreduce:size=4,overlap=next", Allreduce(size=4, overlap="next")),
        ("allreduce:bucket=2MB,check=100", Allreduce(bucket_bytes=2_000_000, check_steps=100)),
        ("allreduce:tree,timeout=2.5", Allreduce("tree", timeout_seconds=2.5)),
        ("allreduce:ring,codec=topk:density=0.01+int8", Allreduce("ring", codec="topk:density=0.01+int8")),
        ("server", Server()),
        ("server:async", Server("async")),
        ("server:bounded:s=3,shards=4", Server("bounded:s=3", 4)),
        ("server:consistency=bounded:s=3,workers=2", Server("bounded:s=3", workers=2)),
        ("server:bsp,optimizer=momentum:rate=0.1,momentum=0.9", Server(optimizer="momentum:rate=0.1,momentum=0.9")),
        ("server:optimizer=sgd:rate=0.1", Server(optimizer="sgd:rate=0.1")),
    ],
)  # fmt: skip
def test_a_text_names_a_choice_and_its_canonical_text_the_same(text, choice):
    assert synchronous_from_spec(text) == choice
    if choice is not None:
        assert synchronous_from_spec(choice.name) == choice
        assert synchronous_from_spec(choice.name).name == choice.name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "choose one of hub, allreduce:ring (or another algorithm) and server:bsp"),
        ("ring", "choose one of hub, allreduce:ring (or another algorithm) and server:bsp"),
        ("allreduce:ring,speed=3", "no argument 'speed'; choose of algorithm, size"),
        ("allreduce:ring,tree", "no argument 'tree'; choose of algorithm, size"),
        ("allreduce:size=x", "size is a whole number, got 'x'"),
        ("allreduce:size=-1", "size is a whole number, got '-1'"),
        ("allreduce:size=2,size=3", "size is given twice"),
        ("allreduce:overlap=all", "overlap is one of none, next, got 'all'"),
        ("allreduce:timeout=0", "bucket and timeout must be more than 0"),
        ("allreduce:timeout=long", "timeout is a number of seconds, got 'long'"),
        ("allreduce:bucket=8", "bucket is written like 6GB, 512MB or 2e9, not '8': that would be 8 bytes"),
        ("server:shards=two", "shards is a whole number, got 'two'"),
    ],
)
def test_what_cannot_be_is_said_with_the_choices(text, why):
    with pytest.raises(ConfigError) as raised:
        synchronous_from_spec(text)
    assert why in str(raised.value)
