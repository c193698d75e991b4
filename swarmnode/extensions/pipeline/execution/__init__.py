"""One iteration at one member: micro-batches pass through its stage, and it ends with one optimizer step."""
