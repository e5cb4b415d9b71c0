"""The codec thread of a broker: what ends it is said with its reason."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.runtime.broker.jobs import Jobs


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "lack of memory"), (KeyError("w"), "KeyError('w')")])
def test_what_ends_a_broker_is_said_with_its_reason(error, said, caplog):
    async def live():
        broken = asyncio.Event()
        jobs = Jobs("codec", broken.set)
        jobs.start()

        def fails():
            raise error

        jobs.do(fails)
        async with asyncio.timeout(60):
            await broken.wait()
        await jobs.close()
        return jobs.failure

    assert asyncio.run(live()) is error
    assert f"the broker stops: {said}" in caplog.text
