"""A slow line in front of a machine: `slow_line.py PORT HOST PORT DELAY_S BYTES_PER_S`.

It carries each TCP connection to the machine that it stands for, each way with this delay and at most at this
speed. For kernels without netem.
"""

import asyncio
import sys

PIECE_BYTES = 4096


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, speed: float
) -> None:
    loop = asyncio.get_running_loop()
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

    async def take() -> None:
        while True:
            piece = await reader.read(PIECE_BYTES)
            await on_the_way.put((loop.time() + delay_s, piece))
            if not piece:
                return
            await asyncio.sleep(len(piece) / speed)

    async def give() -> None:
        while True:
            due_s, piece = await on_the_way.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take())
        tasks.create_task(give())


async def main(port: int, host: str, far_port: int, delay_s: float, speed: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, far_port)
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(carry(reader, far_writer, delay_s, speed)),
                    asyncio.ensure_future(carry(far_reader, writer, delay_s, speed)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in (writer, far_writer):
                end.transport.abort()

    async with await asyncio.start_server(connect, "0.0.0.0", port) as server:
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
