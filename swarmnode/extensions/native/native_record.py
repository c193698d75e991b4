"""The C kernels as the heart asks for them.

passes.py, decode_kernels.py -> [NATIVE] -> cpu_kernels.py
"""

from swarmnode.cpu_kernels import CpuKernels
from swarmnode.extensions.native import compiler, decode_kernels, passes

NATIVE = CpuKernels(
    fits=passes.fits,
    keep_in=compiler.keep_in,
    prepare=compiler.library,
    rms_norm=passes.rms_norm,
    rms_norm_kept=passes.rms_norm_kept,
    rms_norm_gradient=passes.rms_norm_gradient,
    silu_mul=passes.silu_mul,
    gelu_tanh_mul=passes.gelu_tanh_mul,
    silu_mul_gradient=passes.silu_mul_gradient,
    rotate_heads=passes.rotate_heads,
    rotate_heads_gradient=passes.rotate_heads_gradient,
    packed_attention=passes.packed_attention,
    packed_attention_gradient=passes.packed_attention_gradient,
    cached_rows=decode_kernels.CachedRows,
    split_heads=decode_kernels.split_heads,
    sample=decode_kernels.sample,
)
