"""A Triton kernel for the products of LoRA layers on a CUDA card, used for shapes that a measurement finds it
faster for."""
