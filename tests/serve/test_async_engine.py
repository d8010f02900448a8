"""The engine thread: whatever becomes of a consumer, its blocks come back."""

import asyncio
import contextlib
import gc

import pytest

from octavo.serve import InvalidRequest, SamplingParams
from octavo.serve.output_stream import EngineFailed

PROMPT = "Once upon a time"
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


def idle(stats):
    return stats.num_running == stats.num_waiting == stats.num_active_blocks == 0


@pytest.fixture
def async_engine(server):
    """The shared server's engine, idle before and after."""
    server.wait_until(idle)
    yield server.async_engine
    gc.collect()
    server.wait_until(idle)


def test_a_stream_ends_after_its_last_output(async_engine):
    async def read():
        return [output async for output in await async_engine.submit(PROMPT, SHORT)]

    outputs = asyncio.run(read())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert sum(len(output.token_ids) for output in outputs) == 5
    assert outputs[-1].num_generated_tokens == 5


def test_several_event_loops_are_served_at_once(async_engine):
    async def read():
        stream = await async_engine.submit(PROMPT, SHORT)
        return "".join([output.text async for output in stream])

    async def elsewhere():
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, read()) for _ in range(3)))

    assert len(set(asyncio.run(elsewhere()))) == 1


def test_a_closed_stream_is_cancelled(async_engine):
    async def read_a_little():
        stream = await async_engine.submit(PROMPT, LONG)
        with contextlib.closing(stream):
            await anext(stream)
            assert (await async_engine.stats()).num_running == 1

    asyncio.run(read_a_little())


def test_a_dropped_stream_is_cancelled(async_engine):
    async def forget():
        await async_engine.submit(PROMPT, LONG)

    asyncio.run(forget())


def test_requests_whose_event_loop_died_are_cancelled(async_engine, server):
    streams = []

    async def leave():
        streams.append(await async_engine.submit(PROMPT, LONG))

    asyncio.run(leave())
    server.wait_until(idle)


def test_a_cancelled_task_leaves_nothing_behind(async_engine):
    async def cancel_at(delay):
        task = asyncio.ensure_future(async_engine.submit(PROMPT, LONG))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run():
        # Busy requests make each submission wait for a step, so that some are cut while waiting.
        busy = await async_engine.submit_all([(PROMPT, LONG), (PROMPT, LONG)])
        with contextlib.closing(busy):
            for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
                await cancel_at(delay)

    asyncio.run(run())


def test_a_cancelled_request_ends_its_stream(async_engine):
    async def run():
        stream = await async_engine.submit(PROMPT, LONG)
        (request_id,) = stream.request_ids
        first = await anext(stream)
        assert await async_engine.cancel(request_id)
        assert not await async_engine.cancel(request_id)
        return [first, *[output async for output in stream]]

    *_, last = asyncio.run(run())
    assert last.finish_reason == "cancelled"
    assert last.num_generated_tokens < 1500


def test_one_bad_request_refuses_them_all(async_engine):
    bad = SamplingParams(max_tokens=10**6)

    async def run():
        before = await async_engine.stats()
        with pytest.raises(InvalidRequest) as error:
            await async_engine.submit_all([(PROMPT, SHORT), (PROMPT, bad)])
        assert error.value.param == "max_tokens"
        after = await async_engine.stats()
        assert after.generated_tokens == before.generated_tokens

    asyncio.run(run())


def test_closing_ends_every_stream_and_refuses_what_comes_after(new_async_engine):
    async def run():
        stream = await new_async_engine.submit(PROMPT, LONG)
        await anext(stream)
        await asyncio.to_thread(new_async_engine.close)
        with pytest.raises(EngineFailed, match="shut down"):
            async for _ in stream:
                pass
        seen = []
        for _ in range(3):
            with pytest.raises(EngineFailed, match="shut down") as caught:
                await new_async_engine.submit(PROMPT, SHORT)
            seen.append(caught.value)
        assert len(set(map(id, seen))) == 3  # one that is raised again collects frames for ever

    asyncio.run(run())
    new_async_engine.close()
