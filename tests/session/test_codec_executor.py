"""The codec thread of a broker: what ends it is said with its reason."""

from __future__ import annotations

import asyncio
import threading

import pytest

from zmqtrain.core.errors import CodecError, ZmqTrainError
from zmqtrain.session import environment as jobs_module
from zmqtrain.session.environment import CodecExecutor, EffectQueue, spawn


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "lack of memory"), (KeyError("w"), "KeyError('w')")])
def test_what_ends_a_broker_is_said_with_its_reason(error, said, caplog):
    async def live():
        broken = asyncio.Event()
        jobs = CodecExecutor("codec", broken)
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
        jobs = CodecExecutor("test-jobs", asyncio.Event())
        monkeypatch.setattr(jobs, "on_job_failed", broken.append)
        jobs.start()
        jobs.submit(go_on.wait, heard.append)
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
        jobs = CodecExecutor("test-jobs", asyncio.Event())
        jobs.start()
        jobs.do(lambda: 1)
        assert await jobs.close() and jobs.failure is None

    asyncio.run(main())


def test_a_job_that_comes_while_the_thread_ends_is_dropped_and_is_no_failure() -> None:
    """As where another thread's copy is done just then, and what follows from it is for this one."""

    async def main() -> CodecExecutor:
        jobs = CodecExecutor("test-jobs", asyncio.Event())
        jobs.start()
        await jobs.close()
        jobs.do(lambda: None)
        return jobs

    assert asyncio.run(main()).failure is None


def test_what_an_effect_brings_about_comes_after_all_that_was_wished_before():
    done = []

    def carry_out_one(effect):
        if effect == "a":
            queue.carry_out(["a1", "a2"])
        done.append(effect)

    queue = EffectQueue(carry_out_one)
    queue.carry_out(["a", "b"])
    assert done == ["a", "b", "a1", "a2"]


def test_an_effect_that_fails_is_raised_and_does_not_keep_what_comes_next():
    done = []

    def carry_out_one(effect):
        if effect == "broken":
            raise ValueError(effect)
        done.append(effect)

    queue = EffectQueue(carry_out_one)
    with pytest.raises(ValueError, match="broken"):
        queue.carry_out(["broken", "a"])
    queue.carry_out(["b"])
    assert done == ["a", "b"]


def test_a_coroutine_goes_on_with_the_results_of_its_jobs_in_order_and_with_a_codec_error_where_it_waits() -> None:
    done: list[object] = []

    def unsound() -> None:
        raise CodecError("unsound")

    async def main() -> None:
        stop = asyncio.Event()
        codec = CodecExecutor("test-jobs", stop)
        codec.start()

        async def check(name: str) -> None:
            done.append(name)
            done.append(await codec(str.upper, name))
            try:
                await codec(unsound)
            except CodecError as error:
                done.append(f"{name}: {error}")
            raise ValueError(name)

        spawn(check("a"))
        codec.do(done.append, "job")
        spawn(check("b"))
        assert done[0] == "a" and "b" in done, "each runs at once up to its first await"
        await stop.wait()
        await codec.close()
        assert isinstance(codec.failure, ValueError), "an error of ours ends the broker"

    asyncio.run(main())
    assert [one for one in done if one in ("A", "B", "a: unsound")] == ["A", "B", "a: unsound"]
