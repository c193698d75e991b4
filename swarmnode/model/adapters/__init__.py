"""LoRA and quantized matrices: layers, patches and kernels."""
