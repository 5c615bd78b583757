"""The relay in front of the local stack's broker."""

import asyncio

import uvloop

from cli.stack.broker import _pump


def test_a_message_for_a_departed_client_ends_its_connection_alone() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            _, gone = await asyncio.open_connection(host, port)
            gone.close()
            await gone.wait_closed()
            source = asyncio.StreamReader()
            source.feed_data(b"late")
            source.feed_eof()
            await _pump(source, gone)

    uvloop.run(run())
