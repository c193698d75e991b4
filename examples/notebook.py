"""What a notebook does: a node beside other work, without blocking, and the adapter for transformers."""

import asyncio

import swarmnode as sn


async def main():
    node = sn.Node("rev", rounds=20)
    serving = asyncio.create_task(node.serve())
    await asyncio.sleep(1)  # anything else
    print(await serving)
    model, tokenizer = sn.load_adapter()
    ids = tokenizer("rev abc=", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(input_ids=ids, max_new_tokens=9)[0]))


if __name__ == "__main__":
    asyncio.run(main())
