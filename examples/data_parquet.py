"""A data set as Parquet, with columns of names of its own: `pip install -e ".[data]"`."""

import pyarrow
from pyarrow import parquet

import swarmnode as sn

ROWS = [{"asked": f"Half of {2 * n}?", "said": str(n)} for n in range(100)]

if __name__ == "__main__":
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), "halves.parquet")
    print(sn.run("halves.parquet?prompt=asked&answer=said", "numeric_match", rounds=20))
