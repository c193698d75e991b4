/* Every kernel twice: over float32, and over bfloat16 with float32 arithmetic.
 *
 * [kernels.c] <- norm.h, gate.h, rotary.h, packed_attention.h (training), attention.h, sampling.h (decode)
 *
 * Shapes are row-major and contiguous unless a stride says otherwise. The wrappers in Python check them. Inputs and
 * outputs must not overlap where a pointer is `restrict`.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"
#include "lanes.h"
#include "blocks.h"

#define REAL float
#define GET(x) (x)
#define PUT(x) (x)
#define NAME(kernel) kernel##_f32
#include "norm.h"
#include "gate.h"
#include "rotary.h"
#include "attention.h"
#include "sampling.h"
#include "packed_attention.h"
#undef REAL
#undef GET
#undef PUT
#undef NAME

#define REAL uint16_t
#define GET(x) from_bf16(x)
#define PUT(x) to_bf16(x)
#define NAME(kernel) kernel##_bf16
#include "norm.h"
#include "gate.h"
#include "rotary.h"
#include "attention.h"
#include "sampling.h"
#include "packed_attention.h"
