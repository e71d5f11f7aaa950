"""Numbers of the rules by which scales are chosen; plain codecs and Triton kernels read them here."""

ZERO_BLOCK_AMAX = 1e-10  # FP8: a block of zeros gets a small positive scale, as 0 / 0 would be NaN
INT4_LEVELS = 7  # symmetric: -8 is never written, though it is read
INT4_LEAST = 1e-5
INT4_GREATEST = 145 / 128 * 2.0**125  # 7 times the next bf16 number is infinite in bf16
ABOVE_448 = 0x1F  # carries a bf16 mantissa above that of 448 = 1.75 * 2^8 into the exponent
E4M3_FINITE = 1.875 * 2.0**127  # from 1.9375 * 2^127 on e4m3 with a power-of-two scale rounds up to 2^128
E4M3_MAX = 448.0
E2M1_MAX = 6.0
