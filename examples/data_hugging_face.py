"""A data set of Hugging Face on disk; on the hub, "hf:owner/name": `pip install -e ".[data]"`."""

from datasets import Dataset

import swarmnode as sn

if __name__ == "__main__":
    rows = [{"question": f"Half of {2 * n}?", "answer": str(n)} for n in range(100)]
    Dataset.from_list(rows).save_to_disk("halves")
    print(sn.run("./halves", "numeric_match", rounds=20))
