"""The codec thread of a broker: what ends it is said with its reason."""

from __future__ import annotations

import asyncio
import threading

import pytest

from zmqtrain.broker import codec_executor as jobs_module
from zmqtrain.broker.codec_executor import CodecExecutor
from zmqtrain.core.errors import ZmqTrainError


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "lack of memory"), (KeyError("w"), "KeyError('w')")])
def test_what_ends_a_broker_is_said_with_its_reason(error, said, caplog):
    async def live():
        broken = asyncio.Event()
        jobs = CodecExecutor("codec", broken.set)
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


def test_a_job_that_goes_on_after_the_last_wait_is_a_failure_and_its_result_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs_module, "CLOSE_SECONDS", 0.01)
    go_on, done = threading.Event(), threading.Event()
    broken, heard = list[BaseException](), list[object]()

    async def main() -> CodecExecutor:
        jobs = CodecExecutor("test-jobs", lambda: None)
        monkeypatch.setattr(jobs._worker, "_failed", broken.append)
        jobs.start()
        jobs.do(go_on.wait, heard.append)
        jobs.do(done.set)
        assert not await jobs.close()
        return jobs

    jobs = asyncio.run(main())
    assert isinstance(jobs.failure, ZmqTrainError) and "has not ended" in str(jobs.failure)
    go_on.set()  # its loop is closed by now
    jobs._worker._thread.join(10.0)
    assert not jobs._worker._thread.is_alive() and not broken and not heard


def test_a_codec_thread_that_ends_in_time_is_no_failure() -> None:
    async def main() -> None:
        jobs = CodecExecutor("test-jobs", lambda: None)
        jobs.start()
        jobs.do(lambda: 1)
        assert await jobs.close() and jobs.failure is None

    asyncio.run(main())


def test_a_job_that_comes_while_the_thread_ends_is_dropped_and_is_no_failure() -> None:
    """As where another thread's copy is done just then, and what follows from it is for this one."""

    async def main() -> CodecExecutor:
        jobs = CodecExecutor("test-jobs", lambda: None)
        jobs.start()
        await jobs.close()
        jobs.do(lambda: None)
        return jobs

    assert asyncio.run(main()).failure is None
